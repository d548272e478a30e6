"""The facts that the ledger checks: what the records say about one prompt group and one train step,
and which records are purged and so can't be expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from sys import intern
from typing import NamedTuple, Protocol

from relax_events.events.generations import (
    DIGEST_BYTES,
    compute_array_digest,
    describe_trajectory,
)
from relax_events.events.parts import Array, SampleOutcome
from relax_events.events.types import (
    PromptGroupEnded,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.projections.purged_ranges import PurgedRanges
from relax_events.staleness import IssuedGroup
from relax_events.topics.names import EVALUATION_FIELDS, ROLLOUT_SAMPLES, TRAINING_SAMPLES

ReadyPosition = tuple[int, int, str]
"""Partition and offset of a record of advantage.samples, and the id of one of its samples."""


class Verdict(StrEnum):
    """Whether a sample's advantages follow from its rewards; values say why that is not known."""

    AGREES = ""
    DIFFERS = "they differ"
    OTHER_RELEASE = "another release computed them"
    NOT_RUN = "the code of their algorithm is not run here"
    INCOMPLETE = "the records and arrays of their prompt group are not all on the log"


class AdvantageCheck(Protocol):
    """Computes the advantages of ready samples again."""

    def add(
        self, sample: SampleReady, at: ReadyPosition
    ) -> Iterable[tuple[ReadyPosition, Verdict]]:
        """Take a sample; return the verdicts on its prompt group's samples once all are there."""
        ...

    def forget(self, prompt_group_id: str) -> None:
        """Drop what is held of a prompt group."""
        ...


def digest_reward_parts(event: SampleScored | SampleReady) -> bytes:
    """Return a digest of a reward's components and its parts by turn and token; empty without."""
    arrays = (event.turn_rewards, event.token_rewards)
    if not event.components and arrays == (None, None):
        return b""
    return _digest(sorted(event.components.items()), *arrays)


def digest_evaluation(event: SampleEvaluated) -> bytes:
    """Return a digest of what a model computed for a sample."""
    return _digest(event.model_role, event.values, event.topk_logprobs)


def digest_evaluations(sample: SampleReady) -> tuple[tuple[str, bytes], ...]:
    """Return the digests of what models computed for a sample, as the ready record has it, with the
    model's role; each is equal to that of its `SampleEvaluated`.
    """
    evaluations = ((role, getattr(sample, name)) for role, name in EVALUATION_FIELDS.items())
    return tuple(
        (role, _digest(role, values, sample.topk_teacher_logprobs if role == "teacher" else None))
        for role, values in evaluations
        if values is not None
    )


def _digest(what: object, *arrays: Array | None) -> bytes:
    parts = [None if array is None else compute_array_digest(array) for array in arrays]
    return sha256(repr((what, parts)).encode()).digest()[:DIGEST_BYTES]


class Generated(NamedTuple):
    """A copy of a sample on rollout.samples. Its versions are those of its token segments, not of a
    summary field.
    """

    owner: int
    oldest: int
    newest: int
    tokens: bytes
    rest: bytes
    """Digest of what was generated besides the tokens, as the ready record must have it."""
    generation: str
    whole: bytes
    """Digest of all that was generated besides the tokens."""
    offset: int
    """Of the first of its equal records."""

    @classmethod
    def from_event(
        cls, event: SampleRolledOut, *, offset: int, has_segments: bool = True
    ) -> Generated:
        """Build it from the record.

        Args:
            event: The sample.
            offset: Of the record.
            has_segments: Whether the ready record has version segments, too.
        """
        tokens, whole = describe_trajectory(event)
        rest = whole if has_segments else describe_trajectory(event, has_segments=False).rest
        versions = [segment.policy_version for segment in event.version_segments] or [
            event.key.min_policy_version,
            event.key.max_policy_version,
        ]
        return cls(
            event.policy_version,
            min(versions),
            max(versions),
            tokens,
            rest,
            intern(event.key.generation_digest),
            whole,
            offset,
        )


class Ready(NamedTuple):
    """A record of advantage.samples that holds a sample."""

    sample_id: str
    owner: int
    oldest: int
    newest: int
    tokens: bytes
    rest: bytes
    generation: str
    reward: float | None
    num_samples: int
    is_keyed: bool
    """Whether the record's key is the prompt group."""
    sample_outcome: SampleOutcome
    parts: bytes
    """Digest of the reward's parts."""
    evaluated: tuple[tuple[str, bytes], ...]
    """Digests of what other models computed for it, by the model's role."""
    verdict: Verdict = Verdict.INCOMPLETE

    @classmethod
    def from_event(cls, event: SampleReady, *, key: str, has_segments: bool = True) -> Ready:
        """Build it from the record.

        Args:
            event: The sample.
            key: Of the record; empty where it is unknown.
            has_segments: Whether the run's ready samples have version segments.
        """
        return cls(
            event.sample_id,
            event.policy_version,
            event.key.min_policy_version,
            event.key.max_policy_version,
            *describe_trajectory(event, has_segments=has_segments),
            intern(event.key.generation_digest),
            event.reward,
            event.key.samples_per_prompt,
            key in ("", event.prompt_group_id),
            SampleOutcome.of(event.finish_reason, event.reward),
            digest_reward_parts(event),
            digest_evaluations(event),
        )

    def find_copy(self, copies: Iterable[Generated]) -> Generated | None:
        """Return the copy on rollout.samples that this record holds."""
        return next((copy for copy in copies if copy[:6] == self[1:7]), None)


class Trained(NamedTuple):
    """A sample as a train step names it."""

    sample_id: str
    train_step: int
    partition: int
    offset: int

    @property
    def position(self) -> ReadyPosition:
        """Where the step says that the sample lies."""
        return self.partition, self.offset, self.sample_id


@dataclass(slots=True)
class GroupFacts:
    """The records of a prompt group."""

    group_id: str
    batch_slot: IssuedGroup | None
    """None where the id is malformed."""
    is_issued: bool = False
    num_samples: int = 0
    """As issued; 0 where its issue was not read."""
    num_issues: int = 0
    """Without those for a worker that went silent."""
    are_issues_explained: bool = True
    """Whether each says if it is for a worker that went silent."""
    outcomes: list[PromptGroupEnded] = field(default_factory=list)
    generated: dict[str, list[Generated]] = field(default_factory=dict)
    num_generated: int = 0
    rewards: dict[str, set[tuple[str, float, bytes]]] = field(default_factory=dict)
    """Of each sample, with the generation that was scored, and the digest of the reward's parts."""
    evaluated: dict[str, set[tuple[str, bytes]]] = field(default_factory=dict)
    """Of each sample, the generation that a model computed for, and a digest of the result."""
    ready: dict[ReadyPosition, Ready] = field(default_factory=dict)
    newest_requests: dict[tuple[str, int], int] = field(default_factory=dict)
    """The offset of the newest request to end it, by entity and partition."""
    trained: list[Trained] = field(default_factory=list)

    @property
    def train_steps(self) -> list[int]:
        """The train steps that trained it."""
        return sorted({sample.train_step for sample in self.trained})

    @property
    def trained_ids(self) -> set[str]:
        """Its samples that were trained."""
        return {sample.sample_id for sample in self.trained}

    def is_generated(self, record: Ready) -> bool:
        """Return whether a record has the tokens of one that a rollout worker wrote."""
        return any(
            (copy.tokens, copy.generation) == (record.tokens, record.generation)
            for copy in self.generated.get(record.sample_id, ())
        )

    @property
    def ready_and_trained(self) -> list[Ready]:
        """The records that its train steps name, as far as they were read."""
        records = (self.ready.get(sample.position) for sample in self.trained)
        return [record for record in records if record is not None]


@dataclass(slots=True)
class StepFacts:
    """A train step whose samples have not all been read yet."""

    train_step: int
    samples: list[Trained]
    reported_counts: list[int]

    @classmethod
    def from_event(cls, event: TrainStepCommitted) -> StepFacts:
        """Build it from the record, whose arrays have equal lengths."""
        rows = zip(event.sample_ids, event.positions, strict=True)
        return cls(
            event.train_step,
            [Trained(name, event.train_step, *position) for name, position in rows],
            list(event.staleness_counts),
        )


def find_contradiction(event: TrainStepCommitted) -> str:
    """Return a contradiction between the fields of a step; empty where there is none."""
    lengths = {
        name: len(getattr(event, name))
        for name in ("sample_ids", "partitions", "offsets", "ranks", "micro_batches")
    }
    if len(set(lengths.values())) > 1:
        return (
            "its lists differ in length: "
            f"{', '.join(f'{name} {length}' for name, length in lengths.items())}"
        )
    if event.policy_version != event.train_step + 1:
        return f"train step {event.train_step} makes version {event.policy_version}"
    named = {name.rpartition("/")[0] for name in event.sample_ids}
    if named != set(event.prompt_group_ids) or len(event.prompt_group_ids) != len(named):
        return (
            f"its samples are of {len(named)} prompt groups, it names {len(event.prompt_group_ids)}"
        )
    return ""


@dataclass(slots=True)
class Evidence:
    """Which records may be missing from the log.

    Attributes:
        purged: What a purge may have deleted; None where the log was never purged.
    """

    purged: PurgedRanges | None

    def is_missing(self, sample: Trained) -> bool:
        """Return whether the record of a trained sample is purged."""
        return self.is_purged(TRAINING_SAMPLES, sample.partition, sample.offset)

    def may_lack(self, entity: str, partition: int, version: int) -> bool:
        """Return whether records of a version may be purged."""
        return self.purged is not None and self.purged.may_have_purged_version(
            entity, partition, version
        )

    def is_purged(self, entity: str, partition: int, offset: int) -> bool:
        """Return whether the record at an offset is purged."""
        return self.purged is not None and self.purged.is_purged(entity, partition, offset)

    def lost_issue(self, group: GroupFacts) -> bool:
        """Return whether an ended prompt group may have been issued by a purged record."""
        return (
            not group.is_issued
            and bool(group.outcomes)
            and self.purged is not None
            and self.purged.may_have_purged_issue(group.group_id)
        )

    def lost_samples(self, group: GroupFacts) -> bool:
        """Return whether missing samples of a trained prompt group were purged."""
        partitions = {sample.partition for sample in group.trained}
        return any(self.is_purged(ROLLOUT_SAMPLES, partition, 0) for partition in partitions)
