"""All records of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_events.errors import ConfigError, ObjectError
from relax_events.events.generations import get_trajectory_key
from relax_events.events.parts import Array, Outcome
from relax_events.events.types import SampleReady, SampleRolledOut, SampleScored
from relax_events.history.run_log import DecodedRecord, RunLog
from relax_events.history.samples.filter import SampleFilter
from relax_events.history.samples.reader import read_sample_events, read_samples
from relax_events.history.samples.view import SampleView
from relax_events.models.token_table import token_texts
from relax_events.objects import ObjectStore, check_out
from relax_events.topics.names import TRAINING_SAMPLES


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token with its computed values, None where there is none, and the index of its path in a
    sample that has several.
    """

    token: int
    text: str
    is_trained: bool
    rollout_logprob: float | None
    actor_logprob: float | None
    ref_logprob: float | None
    advantage: float | None
    teacher_logprob: float | None = None
    path: int = 0


@dataclass(frozen=True, slots=True)
class SampleDetail:
    """A sample with its advantage record, the scores of rescorings, and its tokens when
    requested.
    """

    view: SampleView
    newest_version: int
    num_generations: int
    ready: DecodedRecord[SampleReady] | None
    other_scores: dict[str, SampleScored] = field(default_factory=dict)
    tokens: list[TokenRow] = field(default_factory=list)


def read_detail(log: RunLog, sample_id: str, *, with_tokens: bool = False) -> SampleDetail:
    """Read one sample. Of several generations it is the trained one, or else the newest.

    Args:
        log: The run's log.
        sample_id: The sample.
        with_tokens: Fetch its arrays and decode its tokens.
    Raises:
        ConfigError: The id is malformed, or the log has no such sample, or the tokenizer is
            missing.
        ObjectError: Its stored arrays can't be fetched.
    """
    views = read_generations(log, sample_id)
    view = views[-1]
    ready = next(read_sample_events(log, view.sample, TRAINING_SAMPLES, SampleReady), None)
    rows = token_rows(log, view.sample, ready.event if ready else None) if with_tokens else []
    return SampleDetail(
        view, log.newest_version, len(views), ready, other_scores(log, view.sample), rows
    )


def read_generations(log: RunLog, sample_id: str) -> list[SampleView]:
    """Return every generation of a sample, oldest first, but the trained one last; at least one.

    Raises:
        ConfigError: The id is malformed, or the log has no such sample.
    """
    if "/" not in sample_id:
        raise ConfigError(f"{sample_id!r} is no sample id; they look like 000012-0003-0/5")
    views = sorted(
        read_samples(log, SampleFilter(sample_id=sample_id)),
        key=lambda view: (view.outcome == Outcome.TRAINED, view.written_at),
    )
    if not views:
        raise ConfigError(
            f"the log of run {log.config.run.id} has no sample {sample_id}; relax samples "
            "RUN_FILE --from beginning shows those that it has"
        )
    return views


def other_scores(log: RunLog, sample: SampleRolledOut) -> dict[str, SampleScored]:
    """Return the scores that rescorings gave a sample, by the name of the scores."""
    prefix, scores = log.plan.topic("reward.scores."), {}
    partition = log.plan.partition(sample.prompt_group_id, sample.policy_version)
    for topic in sorted(name for name in log.topics if name.startswith(prefix)):
        entity = log.plan.parse_entity(topic)
        for record in log.read(log.full_ranges(entity, [partition]), SampleScored):
            if get_trajectory_key(record.event) == get_trajectory_key(sample):
                scores[topic.removeprefix(prefix)] = record.event
                break
    return scores


def token_rows(log: RunLog, sample: SampleRolledOut, ready: SampleReady | None) -> list[TokenRow]:
    """Return a sample's tokens, with the values of the advantage record where there is one."""
    store = ObjectStore.open(log.config.objects_uri, uri_aliases=log.config.objects.uri_aliases)
    whole = check_out(sample, store)
    trained = check_out(ready, store) if ready else None
    tokens = np.asarray(whole.tokens).tolist()
    lengths = whole.path_lengths or [len(tokens)]
    columns: list[Sequence[Any]] = [
        to_numbers(whole.rollout_logprobs, len(tokens)),
        to_numbers(trained.actor_logprobs if trained else None, len(tokens)),
        to_numbers(trained.ref_logprobs if trained else None, len(tokens)),
        to_numbers(trained.advantages if trained else None, len(tokens)),
        to_numbers(trained.teacher_logprobs if trained else None, len(tokens)),
        np.repeat(np.arange(len(lengths)), lengths).tolist(),
    ]
    rows = zip(
        tokens,
        token_texts(log.config.model.path, tokens),
        np.asarray(whole.loss_mask).astype(bool).tolist(),
        *columns,
        strict=True,
    )
    return [TokenRow(*row) for row in rows]


def to_numbers(array: Array | None, length: int) -> Sequence[float | None]:
    """Return an array's values as numbers.

    Raises:
        ObjectError: Its length differs from the sample's.
    """
    if array is None:
        return [None] * length
    if len(array) != length:
        raise ObjectError(f"an array of the sample has {len(array)} values for {length} tokens")
    numbers: list[float | None] = np.asarray(array).astype(float).tolist()
    return numbers
