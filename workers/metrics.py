"""The metrics role: gathers what every worker reports into the run's folder, as JSON lines and, if wanted, TensorBoard files."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import orjson

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.types import Event, MetricsReported, PolicyEvaluated, TrainStepCommitted
from relax_events.pipeline.failpoints import failpoint
from relax_events.pipeline.worker import Worker
from workers.opening import open_worker

IDLE_SECONDS = 0.5
Track = Callable[[dict[str, float], int, str], None]


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker("metrics", config, index=index, follow=("control.metrics", "control.train-steps", "control.evaluations")) as worker:
        MetricsLoop(worker).run()


class MetricsLoop:
    """Waits for figures on the control log. The file is written anew from the log at each start, so nothing is doubled."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._track = open_tracker(worker.config)

    def run(self) -> None:
        """Write until the drain starts."""
        worker = self._worker
        worker.drain.on_start(lambda: self._inbox.put(None))
        worker.follow(self._inbox.put)
        path = worker.config.run_directory / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            while not worker.drain.requested:
                started = time.monotonic()
                try:
                    event = self._inbox.get(timeout=IDLE_SECONDS)
                except queue.Empty:
                    event = None
                if (line := self._line(event)) is not None:
                    failpoint("metrics.before_write")
                    file.write(orjson.dumps(line) + b"\n")
                    worker.finished(1, started)
                worker.tick(working=event is not None)

    def _line(self, event: Event | None) -> dict[str, Any] | None:
        if isinstance(event, TrainStepCommitted):
            self._track(event.figures, event.train_step, "train")
            self._track(event.phase_seconds, event.train_step, "phase_seconds")
            return {"train_step": event.train_step, "at": event.committed_at, **event.figures, "phase_seconds": event.phase_seconds}
        if isinstance(event, PolicyEvaluated):
            figures = evaluation_figures(event)
            self._track(figures, event.policy_version, f"evaluation/{event.dataset}")
            return {"dataset": event.dataset, "at": event.evaluated_at, "policy_version": event.policy_version, **figures}
        if isinstance(event, MetricsReported):
            if "value_loss" in event.values:  # the critic's figures of the train step that made this version
                self._track(event.values, event.policy_version - 1, "critic")
            return {"worker_id": event.worker_id, "at": event.reported_at, "policy_version": event.policy_version, **event.values}
        return None


def evaluation_figures(event: PolicyEvaluated) -> dict[str, float]:
    """Return the figures of an evaluation that are known, by name."""
    figures = {"reward_mean": event.reward_mean, "reward_stderr": event.reward_stderr, "completion_tokens_mean": event.completion_tokens_mean}
    passes = {f"pass_at_{k}": value for k, value in event.pass_at_k.items()}
    return {name: value for name, value in figures.items() if value is not None} | passes


def open_tracker(config: RunConfig) -> Track:
    """Return what figures are handed to besides the file.

    Raises:
        ConfigError: TensorBoard is wanted and not installed.
    """
    if not config.telemetry.tensorboard:
        return lambda figures, step, prefix: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(f"telemetry.tensorboard needs {error.name}; install relax-events[trackers] or set it to false") from None
    writer = SummaryWriter(str(config.run_directory / "tensorboard"))

    def track(figures: dict[str, float], step: int, prefix: str) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"{prefix}/{name}", value, step)

    return track
