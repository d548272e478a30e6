"""Trackers receive each metric once, and a failing tracker affects no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.telemetry import delivery as feeding
from relax_events.telemetry.delivery import DeliveryQueue
from relax_events.telemetry.trackers import (
    DeliveryProgress,
    StepMetrics,
    open_tracker_queue,
    open_tracker_queues,
    require_trackers,
)
from tests.unit.run_events import run_config

PATIENCE_SECONDS = 60.0


class Kept:
    """A tracker that may refuse, hang, or forget."""

    def __init__(self, *, refusals: int = 0, remembers: bool = True, hangs: bool = False) -> None:
        self.refusals, self.remembers, self.hangs = refusals, remembers, hangs
        self.taken: list[tuple[str, int]] = []
        self.released = threading.Event()
        self.is_closed = False

    def write(self, step_metrics: StepMetrics) -> None:
        if self.hangs:
            self.released.wait(PATIENCE_SECONDS)
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("the server is down")
        self.taken.append((step_metrics.series, step_metrics.step))

    def close(self) -> None:
        self.is_closed = True


def step_metrics(step: int, series: str = "train") -> StepMetrics:
    return StepMetrics(
        series,
        step,
        1_700_000_000_000_000 + step,
        {"loss": 0.5 / (step + 1), "reward_mean": float(step)},
    )


@pytest.fixture
def feed_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[DeliveryQueue[StepMetrics], list[str]]]:
    monkeypatch.setattr(feeding, "BACKOFF_SECONDS", 0.01)

    def make(tracker: Kept) -> tuple[DeliveryQueue[StepMetrics], list[str]]:
        errors: list[str] = []
        return open_tracker_queue(
            "kept",
            lambda memory: tracker,
            memory=DeliveryProgress(tmp_path / "kept.json"),
            failed=errors.append,
        ), errors

    return make


def test_metrics_arrive_in_order_after_a_tracker_outage(
    feed_of: Callable[..., tuple[DeliveryQueue[StepMetrics], list[str]]],
) -> None:
    tracker = Kept(refusals=4)
    feed, errors = feed_of(tracker)
    for step in range(50):
        feed.put(step_metrics(step))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(tracker.taken) < 50 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert feed.close(timeout_seconds=PATIENCE_SECONDS)
    assert tracker.taken == [("train", step) for step in range(50)]
    assert (errors, tracker.is_closed) == (["kept"] * 4, True)


def test_hanging_tracker_delays_neither_the_worker_nor_its_shutdown(
    feed_of: Callable[..., tuple[DeliveryQueue[StepMetrics], list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeding, "MAX_QUEUED", 10)
    tracker = Kept(hangs=True)
    feed, errors = feed_of(tracker)
    for step in range(100):
        feed.put(step_metrics(step))
    assert not feed.close(timeout_seconds=0.2), "it comes back although the tracker still hangs"
    assert feed.is_running
    assert 89 <= len(errors) - 1 <= 90, "all that did not fit, and the end that was not awaited"
    tracker.released.set()


def test_tracker_that_is_down_at_close_is_retried_once_and_abandoned(
    feed_of: Callable[..., tuple[DeliveryQueue[StepMetrics], list[str]]],
) -> None:
    feed, errors = feed_of(Kept(refusals=10**9))
    for step in range(5):
        feed.put(step_metrics(step))
    assert feed.close(timeout_seconds=PATIENCE_SECONDS)
    assert errors


@pytest.mark.parametrize(
    ("remembers", "again"),
    [
        (True, [("train", 3), ("evaluation/held", 4)]),
        (False, [("train", step) for step in range(4)]),
    ],
)
def test_restarted_worker_sends_no_duplicate_metrics_to_trackers(
    feed_of: Callable[..., tuple[DeliveryQueue[StepMetrics], list[str]]],
    remembers: bool,
    again: list[tuple[str, int]],
) -> None:
    first, second = Kept(remembers=remembers), Kept(remembers=remembers)
    for tracker, steps in ((first, 3), (second, 4)):
        feed, _ = feed_of(tracker)
        for step in range(steps):
            feed.put(step_metrics(step))
        feed.put(step_metrics(steps, "evaluation/held"))
        assert feed.close(timeout_seconds=PATIENCE_SECONDS)
    expected = again if remembers else [*again, ("evaluation/held", 4)]
    assert second.taken == expected


def test_error_names_unknown_tracker_or_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"telemetry.trackers: 'aim' is not installed; installed are clearml, mlflow, tensorboard, trackio, wandb",
    ):
        open_tracker_queues(with_trackers(tmp_path, "aim"), failed=lambda _: None)
    own = tmp_path / "mine.py"
    own.write_text("import no_such_library\n\nclass Mine: ...\n")
    with pytest.raises(ConfigError, match="no_such_library"):
        open_tracker_queues(with_trackers(tmp_path, f"{own}:Mine"), failed=lambda _: None)


def test_missing_tracker_package_is_reported_before_the_tracker_loads(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    (tmp_path / "sibling.py").write_text("")
    own.write_text("import json\nimport sibling\nimport no_such_library.part\n\nclass Mine: ...\n")
    with pytest.raises(
        ConfigError,
        match=r"Mine' needs no_such_library; pip install 'relax-events\[trackers\]', or leave it out",
    ):
        require_trackers(with_trackers(tmp_path, f"{own}:Mine").telemetry)
    assert require_trackers(with_trackers(tmp_path, "tensorboard").telemetry) == "tensorboard"
    with pytest.raises(
        ConfigError,
        match=r"'tensorbord' is not installed; installed are clearml.*; did you mean tensorboard\?",
    ):
        require_trackers(with_trackers(tmp_path, "tensorbord").telemetry)


def with_trackers(folder: Path, *names: str) -> RunConfig:
    config = run_config(folder)
    return config.model_copy(
        update={"telemetry": config.telemetry.model_copy(update={"trackers": names})}
    )


def fed(config: RunConfig, *steps: int) -> list[str]:
    """Feed steps to the trackers of a run, as one process of the metrics role would; return the
    errors."""
    errors: list[str] = []
    feeds = open_tracker_queues(config, failed=errors.append)
    for step in steps:
        for feed in feeds:
            feed.put(step_metrics(step))
    assert all(feed.close(timeout_seconds=60) for feed in feeds)
    return errors


def test_tensorboard_is_the_default_and_shows_each_step_once_after_a_restart(
    tmp_path: Path,
) -> None:
    config = run_config(tmp_path)
    assert fed(config, 0, 1) == fed(config, 0, 1, 2) == []
    shown: Any = EventAccumulator(str(config.run_directory / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in shown.Scalars("train/reward_mean")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
    ]
    assert shown.Scalars("train/loss")[1].wall_time == pytest.approx(1_700_000_000.000001)
