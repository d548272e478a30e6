"""Made-up control events of a run, for what shows and reports runs."""

from pathlib import Path
from typing import Any

import numpy as np

from relax_events.config import RunConfig
from relax_events.events.parts import WorkerState
from relax_events.events.types import TrainStepCommitted, WorkerBeat

NOTHING = np.array([], np.int32)


def run_config(directory: Path = Path(".relax"), **run: Any) -> RunConfig:
    """Return a run of four steps."""
    tree = {"id": "shown", "num_steps": 4, "max_staleness": 2, "directory": directory}
    return RunConfig.model_validate({"run": tree | run, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}})


def train_step(step: int, *, at_seconds: float, staleness: tuple[int, ...] = (1, 1), **figures: float) -> TrainStepCommitted:
    """Return a step of two samples, 100 tokens and half a second in phases."""
    return TrainStepCommitted(
        train_step=step,
        policy_version=step + 1,
        prompt_group_ids=[f"{step:06d}-0000-0"],
        sample_ids=[f"{step:06d}-0000-0/0", f"{step:06d}-0000-0/1"],
        partitions=NOTHING,
        offsets=NOTHING,
        ranks=NOTHING,
        micro_batches=NOTHING,
        consumed=[],
        staleness_counts=list(staleness),
        figures={"reward_mean": 0.5, "loss": 0.25, "kl_estimate": 0.003, "staleness_mean": 0.5, "num_tokens": 100.0, **figures},
        phase_seconds={"wait": 0.375, "update": 0.125},
        weights_digest=bytes([step % 256] * 32),
        committed_at=int(at_seconds * 1e6),
    )


def beat(worker_id: str, *, at_seconds: float, state: WorkerState = WorkerState.WORKING, pid: int = 1) -> WorkerBeat:
    """Return a heartbeat of a worker that has processed 7 records, has 3 in flight and serves version 2."""
    return WorkerBeat(
        worker_id=worker_id,
        role=worker_id.rpartition("-")[0],
        host="here",
        pid=pid,
        state=state,
        num_processed=7,
        num_in_flight=3,
        policy_version=2,
        last_progress_at=int(at_seconds * 1e6),
        beat_at=int(at_seconds * 1e6),
    )
