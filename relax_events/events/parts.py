"""What events are put together from: references, messages, positions, and the words that fields may
hold.

Arrays are numpy views on the record's bytes (read-only, little-endian, C order), or a `StoredArray`
when the array travelled by claim check and has not been fetched. Times are microseconds since the
epoch, UTC.
"""

from __future__ import annotations

import time
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from relax_events.events.immutable import immutable


def now_micros() -> int:
    """Return the time now, in microseconds since the epoch (UTC)."""
    return time.time_ns() // 1000


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Outcome(StrEnum):
    """How a prompt group ended."""

    TRAINED = "trained"
    FILTERED = "filtered"
    EXPIRED = "expired"
    FAILED = "failed"


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
    digest: bytes
    num_bytes: int


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
    digest: bytes
    media_type: str
    num_bytes: int
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    rate_hertz: float | None = None

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
    text: str | None = None
    media: MediaRef | None = None


@immutable(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation."""

    role: str
    parts: list[ContentPart]

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
    num_tokens: int
    kept_cache: bool = False


@immutable(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """Identity of a sample: its prompt group, its policy versions and its generation.

    The rollout role builds it once; every later event about the sample carries the same value.
    """

    sample_id: str
    prompt_group_id: str
    sample_index: int
    samples_per_prompt: int
    train_step: int
    group_index: int
    attempt: int
    row: int
    policy_version: int
    min_policy_version: int
    max_policy_version: int
    generation_digest: str = ""


@immutable(frozen=True, slots=True, kw_only=True)
class GenerationKey:
    """Identity of one generation of a prompt group: what the keys of its samples have in common."""

    prompt_group_id: str
    samples_per_prompt: int
    train_step: int
    group_index: int
    attempt: int
    row: int
    policy_version: int
    generation_digest: str = ""


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
    partition: int
    offset: int


@immutable(frozen=True, slots=True)
class CheckpointRef:
    """A trainer state in the object store."""

    policy_version: int
    uri: str
    digest: bytes
