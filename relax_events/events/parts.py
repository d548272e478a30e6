"""What events are put together from: references, messages, positions, and the words that fields may
hold.

Arrays are numpy views on the record's bytes (read-only, little-endian, C order), or a `StoredArray`
when the array travelled by claim check and has not been fetched. Times are microseconds since the
epoch, UTC.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import field
from enum import Enum, StrEnum
from typing import Annotated, SupportsFloat, TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_events.events.immutable import immutable

MAX_REWARD = float(np.finfo(np.float32).max)
"""Highest magnitude of a reward and of each of its parts: advantages are float32."""
REWARD_RANGE = "within +-3.4e38"


def is_reward(value: SupportsFloat) -> bool:
    """Return whether a number may be a reward: float32 can hold it."""
    try:
        return abs(float(value)) <= MAX_REWARD
    except OverflowError:  # an integer
        return False


def now_micros() -> int:
    """Return the time now, in microseconds since the epoch (UTC)."""
    return time.time_ns() // 1000


class Column(Enum):
    """How a record of several samples holds a field that each sample has for itself; a field
    without a place is one that they share.
    """

    EACH = "a list"
    TOKENS = "one sample after the other, in an array along their tokens"
    PACKED = "an array of numbers"


T = TypeVar("T")
Each = Annotated[T, Column.EACH]
Tokens = Annotated[T, Column.TOKENS]
Packed = Annotated[T, Column.PACKED]


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    LATE = "late"
    """The policy's turn made its program or its environment late."""
    LOST = "lost"
    """Its environment, engine or media failed; it has no generated token."""

    @property
    def is_scored(self) -> bool:
        """Whether a reward function scores samples that ended so."""
        return self not in (FinishReason.LATE, FinishReason.LOST)


class SampleOutcome(StrEnum):
    """What became of a sample of a prompt group (ADR 78)."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """Its length ended it."""
    LATE = "late"
    """The policy made its program or its environment late."""
    LOST = "lost"
    """Its environment, engine or media failed."""
    REFUSED = "refused"
    """It was generated, and its reward function failed."""

    @classmethod
    def of(cls, finish_reason: FinishReason, reward: float | None) -> SampleOutcome:
        """Return the outcome of a sample that ended so, with the reward that it got, if any."""
        if finish_reason is FinishReason.LATE:
            return cls.LATE
        if finish_reason in (FinishReason.LOST, FinishReason.ERROR, FinishReason.ABORT):
            return cls.LOST
        if reward is None:
            return cls.REFUSED
        return cls.TRUNCATED if finish_reason is FinishReason.LENGTH else cls.FINISHED


class Outcome(StrEnum):
    """How a prompt group ended."""

    TRAINED = "trained"
    FILTERED = "filtered"
    EXPIRED = "expired"
    FAILED = "failed"


TOO_LARGE = "out of memory"
"""What the reason of a failed prompt group begins with whose sample does not fit the trainer's
device."""


class Modality(StrEnum):
    """What a content part is."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class Command(StrEnum):
    """A command of the controller."""

    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    STOP = "stop"
    RESTART = "restart"
    SCALE = "scale"
    PHASE = "phase"
    UNKNOWN = "unknown"


class WorkerState(StrEnum):
    """What a work loop is at."""

    STARTING = "starting"
    WORKING = "working"
    IDLE = "idle"
    DRAINING = "draining"
    STOPPED = "stopped"


@immutable(frozen=True, slots=True)
class ObjectRef:
    """Address of a large object in the object store, and the digest that verifies it."""

    uri: str
    """Address of the object."""
    digest: bytes
    """SHA-256 of the object's bytes, checked on every read."""
    num_bytes: int
    """Size of the object."""


@immutable(frozen=True, slots=True)
class StoredArray:
    """An array stored in the object store."""

    dtype: str
    shape: tuple[int, ...]
    reference: ObjectRef

    def __len__(self) -> int:
        """Return the length of the first axis, as numpy does; nothing is fetched."""
        return self.shape[0]


Array = NDArray[np.generic] | StoredArray


@immutable(frozen=True, slots=True)
class MediaRef:
    """An image, an audio file or a video, addressed by content."""

    uri: str
    """Address in the object store or another configured root."""
    digest: bytes
    """SHA-256 of the encoded media."""
    media_type: str
    """Internet media type, for example image/png."""
    num_bytes: int
    """Size of the encoded media."""
    width: int | None = None
    """Pixels, for images and video."""
    height: int | None = None
    """Pixels, for images and video."""
    num_frames: int | None = None
    """Frames of a video, or sample frames of audio."""
    rate_hertz: float | None = None
    """Frames per second of a video, or samples per second of audio."""

    @property
    def extent(self) -> str:
        """How large and how long it is, for people."""
        size = f"{self.width} x {self.height}" if self.width and self.height else ""
        length = (
            f"{self.num_frames} frames at {self.rate_hertz:g} Hz"
            if self.num_frames and self.rate_hertz
            else ""
        )
        return ", ".join(part for part in (size, length) if part)


@immutable(frozen=True, slots=True)
class ContentPart:
    """A piece of a chat message: text or media."""

    kind: Modality
    """Modality of this part."""
    text: str | None = None
    """The text, for kind text."""
    media: MediaRef | None = None
    """The media, for the other kinds."""


@immutable(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant's message."""

    name: str
    """Name of the tool."""
    arguments: str = "{}"
    """JSON text of the arguments, as the policy or its program wrote it."""
    id: str = ""
    """Id that the message with the result names; empty when it has none."""


@immutable(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    parts: list[ContentPart] = field(default_factory=list)
    """Content in order."""
    reasoning: str = ""
    """Thoughts before the content of an assistant's message."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Tool calls after the content of an assistant's message."""
    name: str = ""
    """Name of the speaker or of the tool; empty when it has none."""
    tool_call_id: str = ""
    """Id of the tool call that a message of role tool answers."""

    @classmethod
    def of_text(cls, role: str, text: str) -> ChatMessage:
        """Make a message of text only."""
        return cls(role, [ContentPart(Modality.TEXT, text)])

    @property
    def text(self) -> str:
        """All text of the message, joined."""
        return "".join(part.text or "" for part in self.parts)


@immutable(frozen=True, slots=True)
class VersionSegment:
    """A run of generated tokens that came from one policy version."""

    policy_version: int
    """Version of the weights."""
    num_tokens: int
    """Generated tokens in the run."""
    kept_cache: bool = False
    """True when the attention cache was kept from older weights, so that the log-probabilities are
    approximate."""


def merge_segments(
    segments: tuple[VersionSegment, ...], more: Iterable[VersionSegment]
) -> tuple[VersionSegment, ...]:
    """Append runs of tokens; merge equal neighbours, drop empty ones."""
    joined = list(segments)
    for run in more:
        last = joined[-1] if joined else None
        if last and (last.policy_version, last.kept_cache) == (run.policy_version, run.kept_cache):
            joined[-1] = VersionSegment(
                run.policy_version, last.num_tokens + run.num_tokens, run.kept_cache
            )
        elif run.num_tokens:
            joined.append(run)
    return tuple(joined)


@immutable(frozen=True, slots=True, kw_only=True)
class GenerationKey:
    """Identity of one generation of a prompt group: what the keys of its samples have in common."""

    prompt_group_id: str
    """Derived from train step, position and attempt; unique in the run."""
    samples_per_prompt: int
    """Samples in the prompt group."""
    train_step: int
    """Step for which the prompt group was issued."""
    group_index: int
    """Position among the step's prompt groups."""
    attempt: int
    """Attempt of the prompt group: 0 for the first issue, +1 for each reissue."""
    row: int
    """Position in the stream of prompts."""
    policy_version: int
    """Version that owns the sample's slot: the lowest of its prompt group."""
    generation_digest: str = ""
    """Identifies this generation of the prompt group, as a lapsed lease may cause a second one
    under the same ids: "v2-" and 32 hexadecimal digits, computed from the digests of its samples.
    Empty when the producer gives none; all such samples count as one generation. What is generated
    is proven only by a digest of this form."""


@immutable(frozen=True, slots=True, kw_only=True)
class SampleKey(GenerationKey):
    """Identity of a sample: its prompt group, its policy versions and its generation.

    The rollout role builds it once; every later event about the sample carries the same value.
    """

    sample_id: str
    """Prompt group id and position in the prompt group, from which readers of records make it."""
    sample_index: Each[int]
    """Position in the prompt group."""
    min_policy_version: Each[int]
    """Lowest version among this sample's tokens."""
    max_policy_version: Each[int]
    """Highest version among this sample's tokens."""


class SampleEvent:
    """Base of the events about one sample: gives short access to the parts of `key` used most."""

    __slots__ = ()

    key: SampleKey

    @property
    def sample_id(self) -> str:
        """Return the sample's id."""
        return self.key.sample_id

    @property
    def prompt_group_id(self) -> str:
        """Return the id of the sample's prompt group."""
        return self.key.prompt_group_id

    @property
    def policy_version(self) -> int:
        """Return the version that owns the sample's slot."""
        return self.key.policy_version


@immutable(frozen=True, slots=True)
class TopicOffset:
    """A position in the log."""

    topic: str
    """Full topic name."""
    partition: int
    """Kafka partition."""
    offset: int
    """Offset of the next record."""


@immutable(frozen=True, slots=True)
class CheckpointRef:
    """A trainer state in the object store."""

    policy_version: int
    """Version whose weights the checkpoint holds."""
    uri: str
    """Address of the checkpoint's folder."""
    digest: bytes
    """SHA-256 of the checkpoint's manifest."""
