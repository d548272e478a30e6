"""Reports about an engine: its load, its use of time, and the counts of its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from relax_events.config import EngineConfig
from relax_events.engines.protocol import Engine, EngineUsage
from relax_events.errors import WeightsError
from relax_events.events.parts import WorkerState
from relax_events.events.types import MetricsReported
from relax_events.roles import engine_monitor as engine_watch
from relax_events.roles.engine_monitor import EngineMonitor
from relax_events.runtime.heartbeat import REPORT_EVERY_HEARTBEATS, Heartbeat
from relax_events.telemetry.metrics import WorkerMetrics


class Watched:
    """A watch of an engine whose usage, and a clock that, the test sets; a heartbeat a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("relax_events.runtime.heartbeat.time.monotonic", lambda: self.now)
        monkeypatch.setattr(engine_watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.engine = SimpleNamespace(
            usage=EngineUsage(num_generated=1000, num_prefilled=50)
        )  # of a run that it was in before
        self.metrics = WorkerMetrics("rollout")
        self.reports: list[dict[str, float]] = []
        heartbeat = Heartbeat(
            self._send, worker_id="rollout-0", role="rollout", interval_seconds=1.0
        )
        looks: list[Any] = []
        config = SimpleNamespace(engine=EngineConfig(threads=1, max_running_samples=64))
        worker = SimpleNamespace(
            metrics=self.metrics,
            heartbeat=heartbeat,
            config=config,
            lifecycle=SimpleNamespace(on_heartbeat=looks.append),
        )
        self.watch = EngineMonitor(cast("Any", worker), cast("Engine", self.engine))
        self._heartbeat, self._looks = heartbeat, looks

    def _send(self, event: Any) -> None:
        if isinstance(event, MetricsReported):
            self.reports.append(dict(event.values))

    def does(self, activity: Any, *, seconds: float, error: Exception | None = None) -> None:
        with self.watch.activity(activity):
            self.now += seconds
            if error is not None:
                raise error

    def send_heartbeat(self) -> None:
        """Let a second pass, and send a heartbeat as a worker does."""
        self.now += 1.0
        if self._heartbeat.tick(WorkerState.WORKING):
            for look in self._looks:
                look()

    def reported(self, name: str) -> dict[str, float]:
        """Return what is exposed under a name, by its label next to the role."""
        families = text_string_to_metric_families(self.metrics.render().decode())
        samples = [one for family in families for one in family.samples if one.name == name]
        return {
            next((value for label, value in one.labels.items() if label != "role"), ""): one.value
            for one in samples
        }


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_engine_metrics_are_updated_with_every_heartbeat(watched: Watched) -> None:
    watched.engine.usage = EngineUsage(
        num_decoding=12,
        num_waiting=3,
        num_generated=1200,
        num_prefilled=80,
        num_cached=70,
        num_recomputed=5,
    )
    watched.send_heartbeat()
    assert watched.reported("relax_engine_samples") == {"decoding": 12, "waiting": 3}
    assert watched.reported("relax_engine_tokens_total") == {
        "generated": 200,
        "prefilled": 30,
        "cached": 70,
        "recomputed": 5,
    }
    watched.engine.usage = EngineUsage(
        num_decoding=1, num_generated=1300, num_prefilled=80, num_cached=70, num_recomputed=5
    )
    watched.send_heartbeat()
    assert watched.reported("relax_engine_samples") == {"decoding": 1, "waiting": 0}
    assert watched.reported("relax_engine_tokens_total") == {
        "generated": 300,
        "prefilled": 30,
        "cached": 70,
        "recomputed": 5,
    }
    assert watched.reported("relax_engine_capacity_samples") == {"": 64}


def test_engine_time_is_counted_by_activity_even_on_failure(watched: Watched) -> None:
    watched.does("generating", seconds=2.0)
    with pytest.raises(WeightsError, match="torn"):
        watched.does("loading", seconds=0.5, error=WeightsError("torn"))
    watched.does("generating", seconds=1.0)
    assert watched.reported("relax_engine_seconds_total") == {"generating": 3.0, "loading": 0.5}


def test_engine_report_covers_the_time_since_the_previous_report(watched: Watched) -> None:
    watched.does("generating", seconds=2.5)
    watched.does("loading", seconds=0.5)
    watched.engine.usage = EngineUsage(
        num_decoding=8, num_generated=1080, num_prefilled=60, num_cached=30, num_recomputed=4
    )
    for _ in range(REPORT_EVERY_HEARTBEATS):
        watched.send_heartbeat()
    for _ in range(REPORT_EVERY_HEARTBEATS):
        watched.send_heartbeat()
    first, second = watched.reports
    elapsed = 2.5 + 0.5 + REPORT_EVERY_HEARTBEATS
    assert first["tokens_per_second"] == pytest.approx(80 / elapsed)
    assert (first["generating_ratio"], first["loading_ratio"]) == (
        pytest.approx(2.5 / elapsed),
        pytest.approx(0.5 / elapsed),
    )
    assert (first["cached_ratio"], first["recomputed_tokens"]) == (0.75, 4.0)
    assert (first["decoding_samples"], first["capacity_samples"]) == (8.0, 64.0)
    assert (
        second["tokens_per_second"],
        second["generating_ratio"],
        second["recomputed_tokens"],
    ) == (
        0.0,
        0.0,
        0.0,
    )
    assert "cached_ratio" not in second
