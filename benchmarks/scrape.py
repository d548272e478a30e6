"""What does it cost a process to be scraped? The exposition of a worker, and of a controller that
knows a large and long run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import generate_latest

from benchmarks import report
from relax_events.config import load_run_config
from relax_events.controller.metrics import RunMetrics
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import TrainStepCommitted, WorkerHeartbeat
from relax_events.projections.run_state import RunState
from relax_events.telemetry.metrics import WorkerMetrics

NUM_WORKERS, NUM_STEPS, NUM_ROUNDS = 200, 2_000, 50
EVERY_SECONDS = 5.0
BOUND = 0.01
RUN_FILE = Path(__file__).parent.parent / "configs" / "quickstart.toml"
QUESTION = f"""Processor time of one scrape, and its share of a core when it comes every {EVERY_SECONDS:g} s as in the stack: medians of
{NUM_ROUNDS}. The worker has counted on every slot of two topics; the controller knows {NUM_WORKERS} workers and {NUM_STEPS:,} train
steps, of which none has left a checkpoint."""


def worker() -> WorkerMetrics:
    """Return the metrics of a worker that has done all that one does."""
    metrics = WorkerMetrics("rollout")
    metrics.consumer_lag(
        {
            (topic, partition): partition
            for topic in ("rollout.samples", "reward.scores")
            for partition in range(24)
        },
        shards=8,
    )
    metrics.processed(8, seconds=0.1)
    metrics.tokens(4096)
    for outcome in ("trained", "filtered", "expired", "failed"):
        metrics.ended(outcome)
    return metrics


def controller() -> WorkerMetrics:
    """Return the metrics of a controller that knows a large run."""
    metrics, state = WorkerMetrics("controller"), RunState()
    figures = {f"figure_{number}": 0.5 for number in range(30)}
    for step in range(NUM_STEPS):
        state.apply(committed(step, figures))
    now = now_micros()
    for index in range(NUM_WORKERS):
        counts = {
            "num_processed": 0,
            "num_in_flight": 0,
            "policy_version": index,
            "last_progress_at": now,
        }
        state.apply(
            WorkerHeartbeat(
                worker_id=f"rollout-{index}",
                role="rollout",
                host="h",
                pid=1,
                state=WorkerState.WORKING,
                **counts,
            )
        )
    metrics.registry.register(RunMetrics(load_run_config(RUN_FILE), state))
    return metrics


def committed(step: int, figures: dict[str, float]) -> TrainStepCommitted:
    """Return a step's record, without what nobody serves."""
    nothing = np.zeros(0, np.int32)
    arrays = {"partitions": nothing, "offsets": nothing, "ranks": nothing, "micro_batches": nothing}
    lists: dict[str, list[Any]] = {
        "prompt_group_ids": [],
        "sample_ids": [],
        "consumed": [],
        "staleness_counts": [1, 1],
    }
    phases = {"wait": 1.0, "forward": 2.0}
    return TrainStepCommitted(
        train_step=step,
        policy_version=step + 1,
        metrics=figures,
        phase_seconds=phases,
        weights_digest=b"",
        **arrays,
        **lists,
    )


def seconds_of(scrape: Callable[[], bytes]) -> float:
    """Return the median processor time of a call."""
    found = []
    for _ in range(NUM_ROUNDS):
        started = time.process_time()
        scrape()
        found.append(time.process_time() - started)
    return statistics.median(found)


def main() -> None:
    """Measure, and write docs/benchmarks/scrape.md."""
    rows, shares = [], []
    for name, metrics in (("worker", worker()), ("controller", controller())):
        seconds, size = (
            seconds_of(lambda metrics=metrics: generate_latest(metrics.registry)),
            len(metrics.exposition()),
        )
        shares.append(seconds / EVERY_SECONDS)
        rows.append(
            {
                "process": name,
                "a scrape, ms": f"{seconds * 1e3:.2f}",
                "bytes": f"{size:,}",
                "share of a core": f"{shares[-1]:.3%}",
            }
        )
    verdict = "within" if max(shares) < BOUND else "above"
    report.write(
        "scrape",
        title="What being scraped costs",
        question=QUESTION,
        command="python -m benchmarks.scrape",
        conclusion=f"Both are {verdict} the bound of {BOUND:.0%} of a core.",
        rows=rows,
        data={"shares": shares},
    )


if __name__ == "__main__":
    sys.exit(main())
