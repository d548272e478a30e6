"""Control events of a run, built by hand, for tests of displays and reports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from event_samples import ended, issued, ready, rolled_out, scored
from small_settings import small_run

from relax_events.config import RunConfig
from relax_events.events.parts import Outcome, TopicOffset, WorkerState
from relax_events.events.types import Event, TrainStepCommitted, WorkerHeartbeat


def run_config(directory: Path = Path(".relax"), **run: Any) -> RunConfig:
    """Return a run of four steps."""
    tree = {"id": "shown", "num_steps": 4, "max_staleness": 2, "directory": directory}
    return small_run(
        {"run": tree | run, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}}
    )


def train_step(
    step: int, *, at_seconds: float, staleness: tuple[int, ...] = (1, 1), **values: float
) -> TrainStepCommitted:
    """Return a step of two samples, 100 tokens and half a second in phases."""
    return TrainStepCommitted(
        train_step=step,
        policy_version=step + 1,
        prompt_group_ids=[f"{step:06d}-0000-0"],
        sample_ids=[f"{step:06d}-0000-0/0", f"{step:06d}-0000-0/1"],
        partitions=np.zeros(2, np.int32),
        offsets=np.array([2 * step, 2 * step + 1], np.int64),
        ranks=np.zeros(2, np.int32),
        micro_batches=np.zeros(2, np.int32),
        consumed=[],
        staleness_counts=list(staleness),
        metrics={
            "reward_mean": 0.5,
            "loss": 0.25,
            "kl_estimate": 0.003,
            "staleness_mean": 0.5,
            "num_tokens": 100.0,
            **values,
        },
        phase_seconds={"wait": 0.375, "update": 0.125},
        weights_digest=bytes([step % 256] * 32),
        committed_at=int(at_seconds * 1e6),
    )


def records_of(step: TrainStepCommitted, *, version: int) -> list[tuple[Event, TopicOffset]]:
    """Return the records of a `train_step` and of its prompt group, which this version generated,
    with their offsets."""
    (group,) = step.prompt_group_ids
    records: list[tuple[Event, TopicOffset]] = [
        (issued(group), at("prompt.groups", step.train_step))
    ]
    for index, offset in enumerate(step.offsets.tolist()):  # type: ignore[union-attr]
        records += [
            (rolled_out(group, index, version=version), at("rollout.samples", offset)),
            (scored(group, index, version=version), at("reward.scores", offset)),
            (ready(group, index, version=version), at("advantage.samples", offset)),
        ]
    end = replace(ended(group, Outcome.TRAINED, version=version), trainer_version=step.train_step)
    return [
        *records,
        (step, at("control.train-steps", step.train_step)),
        (end, at("control.prompt-group-outcomes", step.train_step)),
    ]


def at(entity: str, offset: int = 0) -> TopicOffset:
    """Return an offset in a topic of one partition."""
    return TopicOffset(f"relax.shown.{entity}", 0, offset)


def make_heartbeat(
    worker_id: str, *, at_seconds: float, state: WorkerState = WorkerState.WORKING, pid: int = 1
) -> WorkerHeartbeat:
    """Return a heartbeat of a worker that has processed 7 records, has 3 in flight and serves
    version 2."""
    return WorkerHeartbeat(
        worker_id=worker_id,
        role=worker_id.rpartition("-")[0],
        host="here",
        pid=pid,
        state=state,
        num_processed=7,
        num_in_flight=3,
        policy_version=2,
        last_progress_at=int(at_seconds * 1e6),
        sent_at=int(at_seconds * 1e6),
    )
