"""The lineage of a sample: from its prompt to the policy versions that it trained, read from the
log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_events.config import RunConfig
from relax_events.data.sources import is_generated, named_sources, open_source
from relax_events.data.stream import PromptOrder
from relax_events.errors import ConfigError
from relax_events.events.types import (
    PromptGroupEnded,
    PromptGroupIssued,
    SampleEvaluated,
    SampleReady,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.history.run_log import DecodedRecord, RunLog
from relax_events.history.samples.detail import read_generations
from relax_events.history.samples.reader import read_sample_events
from relax_events.history.samples.view import SampleView
from relax_events.topics import compute_shard
from relax_events.topics.names import (
    LOGPROB_TOPICS,
    PROMPT_GROUPS,
    REWARD_SCORES,
    TRAIN_STEPS,
    TRAINING_SAMPLES,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """An event, its time (microseconds since the epoch), its record's location, and its text."""

    what: str
    at: int
    position: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampleLineage:
    """A sample from its prompt to its policy version; `num_generations` above 1 means that it was
    generated again.

    A trained sample is in `first_version` and every later one.
    """

    sample_id: str
    num_generations: int
    stages: list[Stage]
    first_version: int | None


DataRow = Callable[[int], int | None]


def data_rows(config: RunConfig, *, required: bool = False) -> DataRow:
    """Return a function that maps a position of the prompt stream to a data row; None where the
    data is not available.

    Rows are counted through all datasets of the run, one after the other.

    Args:
        config: The run.
        required: Fail when the data is not available.
    Raises:
        ConfigError: It is required and can't be opened.
    """
    try:
        # of generated ones without the package that makes them, which takes seconds to import
        num_rows = [
            part.num_problems
            if is_generated(part)
            else open_source(part, seed=config.run.seed, section=section).num_rows
            for section, part in named_sources(config.data)
        ]
    except ConfigError:
        if required:
            raise
        return lambda _: None
    order = PromptOrder(
        num_rows, seed=config.run.seed, shuffle=config.data.shuffle, weights=config.data.weights
    )
    return lambda row: order.data_row(row) if row >= 0 else None


def issued_groups(
    log: RunLog, prompt_group_id: str = ""
) -> Iterator[DecodedRecord[PromptGroupIssued]]:
    """Read the issued prompt groups, or all issues of one; for one only its partition is read."""
    count = log.plan.queue_partitions
    partitions = [compute_shard(prompt_group_id, shards=count)] if prompt_group_id else range(count)
    for record in log.read(log.full_ranges(PROMPT_GROUPS, partitions), PromptGroupIssued):
        if prompt_group_id in ("", record.event.prompt_group_id):
            yield record


def find_step(log: RunLog, train_step: int) -> DecodedRecord[TrainStepCommitted] | None:
    """Return the record of a train step."""
    return next(
        (
            record
            for record in log.read_control(TRAIN_STEPS, TrainStepCommitted)
            if record.event.train_step == train_step
        ),
        None,
    )


def sample_lineage(log: RunLog, sample_id: str) -> SampleLineage:
    """Follow a sample through all its records. Of several generations it is the trained one, or
    else the newest.

    Raises:
        ConfigError: The id is malformed, or the log has no such sample.
    """
    views = read_generations(log, sample_id)
    view, row = views[-1], data_rows(log.config)
    issued = next(issued_groups(log, view.sample.prompt_group_id), None)
    stages = [
        issued_stage(issued, row),
        rolled_out_stage(view),
        *_scoring_stages(log, view),
        *_outcome_stages(log, view),
    ]
    first = None if view.train_step is None else view.train_step + 1
    return SampleLineage(
        sample_id, len(views), [stage for stage in stages if stage is not None], first
    )


def _scoring_stages(log: RunLog, view: SampleView) -> Iterator[Stage]:
    sample = view.sample
    scored = next(read_sample_events(log, sample, REWARD_SCORES, SampleScored), None)
    if scored is not None:
        yield scored_stage(scored)
    for entity in LOGPROB_TOPICS.values():
        evaluated = next(read_sample_events(log, sample, entity, SampleEvaluated), None)
        if evaluated is not None:
            facts = {
                "model_role": evaluated.event.model_role,
                "policy_version": evaluated.event.model_version,
            }
            yield Stage("evaluated", evaluated.event.computed_at, evaluated.position, facts)
    ready = next(read_sample_events(log, sample, TRAINING_SAMPLES, SampleReady), None)
    if ready is not None:
        yield Stage(
            "ready",
            ready.event.ready_at,
            ready.position,
            {"reward": ready.event.reward, "advantage": read_advantage(ready.event)},
        )


def _outcome_stages(log: RunLog, view: SampleView) -> Iterator[Stage]:
    step = None if view.train_step is None else find_step(log, view.train_step)
    if step is not None:
        yield trained_stage(step, view.sample.sample_id, view.staleness(log.newest_version))
        published = log.versions.get(step.event.policy_version)
        if published is not None:
            facts = {
                "policy_version": published.event.policy_version,
                "artifact": published.event.artifact.uri,
            }
            yield Stage("published", published.event.published_at, published.position, facts)
    ended = log.outcomes.get(view.sample.prompt_group_id)
    if ended is not None:
        yield ended_stage(ended)


def issued_stage(record: DecodedRecord[PromptGroupIssued] | None, row: DataRow) -> Stage | None:
    """Describe which prompt it was and for which step it was issued."""
    if record is None:
        return None
    event = record.event
    facts = {
        "data_row": row(event.row),
        "row": event.row,
        "train_step": event.train_step,
        "attempt": event.attempt,
    }
    return Stage(
        "issued",
        event.issued_at,
        record.position,
        facts | {"required_policy_version": event.required_policy_version},
    )


def rolled_out_stage(view: SampleView) -> Stage:
    """Describe the worker and the policy versions that generated it."""
    sample = view.sample
    facts = {
        "worker_id": sample.worker_id,
        "policy_version": sample.policy_version,
        "versions": [segment.policy_version for segment in sample.version_segments],
        "num_completion_tokens": view.num_completion_tokens,
        "finish_reason": sample.finish_reason.value,
    }
    return Stage("rolled_out", sample.rolled_out_at, view.position, facts)


def scored_stage(record: DecodedRecord[SampleScored]) -> Stage:
    """Describe the reward and the version of the reward function."""
    event = record.event
    facts = {
        "reward": event.reward,
        "reward_name": event.reward_name,
        "reward_digest": event.reward_digest,
        "error": event.error,
    }
    return Stage("scored", event.scored_at, record.position, facts)


def trained_stage(
    record: DecodedRecord[TrainStepCommitted], sample_id: str, staleness: int
) -> Stage:
    """Describe the step and the micro-batch that trained it."""
    step = record.event
    facts: dict[str, Any] = {"train_step": step.train_step, "staleness": staleness}
    if sample_id in step.sample_ids:
        index = step.sample_ids.index(sample_id)
        facts |= {
            "rank": int(np.asarray(step.ranks)[index]),
            "micro_batch": int(np.asarray(step.micro_batches)[index]),
        }
    return Stage("trained", step.committed_at, record.position, facts)


def ended_stage(record: DecodedRecord[PromptGroupEnded]) -> Stage:
    """Describe its prompt group's outcome."""
    event = record.event
    facts = {
        "outcome": event.outcome.value,
        "reason": event.reason,
        "mean_reward": event.mean_reward,
        "trainer_version": event.trainer_version,
    }
    return Stage("ended", event.ended_at, record.position, facts)


def read_advantage(ready: SampleReady) -> float | None:
    """Return a sample's advantage, which all its trained tokens share; None when it is in the
    object store or no token is trained.
    """
    if (
        not isinstance(ready.advantages, np.ndarray)
        or not isinstance(ready.loss_mask, np.ndarray)
        or not ready.loss_mask.any()
    ):
        return None
    return float(ready.advantages[int(np.argmax(ready.loss_mask))])
