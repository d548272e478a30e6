"""The tracing interface of roles. This base implementation records nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

Value = str | bool | int | float | Sequence[str] | Sequence[int]
NO_HEADERS: Mapping[str, str] = {}
NO_ATTRIBUTES: Mapping[str, Value] = {}


class ReadRecord(Protocol):
    """The properties of a record that a trace uses."""

    @property
    def topic(self) -> str:
        """The record's topic."""

    @property
    def partition(self) -> int:
        """The record's partition."""

    @property
    def offset(self) -> int:
        """The record's offset."""

    @property
    def key(self) -> str:
        """The record's prompt group."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The record's headers."""

    @property
    def timestamp_ms(self) -> int:
        """The time at which the record was written."""


class TracedWork:
    """A traced piece of work that has begun."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that carry the trace context."""
        return NO_HEADERS

    def end(self, facts: Mapping[str, Value] = NO_ATTRIBUTES, *, error: str = "") -> None:
        """End the work, with attributes, and with an error if it failed."""


NOT_TRACED = TracedWork()


class Traces:
    """The traces of the prompt groups that a worker processes. Used by the work loop's thread."""

    def add_record(self, record: ReadRecord) -> None:
        """Store the context of a record for its prompt group."""

    def get_headers(self, prompt_group_id: str) -> Mapping[str, str]:
        """Return the trace headers for records of a prompt group."""
        return NO_HEADERS

    def begin_group(
        self, prompt_group_id: str, *, topic: str, instead_of: str = "", **facts: Value
    ) -> TracedWork:
        """Begin a prompt group's trace, if it is sampled.

        Args:
            prompt_group_id: The issued prompt group.
            topic: The target topic, without the run's prefix.
            instead_of: The previous attempt, which ended untrained.
            facts: Attributes of the span.
        """
        return NOT_TRACED

    def record_wait(self, prompt_group_id: str, topic: str) -> None:
        """Record that a prompt group's records of this topic waited from the first one's write
        until now.
        """

    def begin(
        self,
        operation: str,
        prompt_group_id: str,
        *,
        topic: str,
        train_step: int | None = None,
        **facts: Value,
    ) -> TracedWork:
        """Begin work on a prompt group.

        Args:
            operation: The operation, a verb.
            prompt_group_id: The prompt group.
            topic: The topic of the processed records, without the run's prefix.
            train_step: The train step that it is part of.
            facts: Attributes of the span.
        """
        return NOT_TRACED

    @contextmanager
    def trace_groups(
        self, operation: str, prompt_group_ids: Iterable[str], *, topic: str
    ) -> Iterator[None]:
        """Trace work on several prompt groups during the block; an exception ends their work as
        failed.
        """
        yield

    def record_group_end(self, prompt_group_id: str, *, outcome: str, reason: str) -> None:
        """Record that a prompt group ended untrained."""

    def begin_train_step(
        self, train_step: int, *, began_ns: int, headers: Iterable[Mapping[str, str]]
    ) -> TracedWork:
        """Begin a train step's trace after the step, when its prompt groups are known.

        Args:
            train_step: The step's number.
            began_ns: The step's start, in nanoseconds since the epoch.
            headers: The trace headers of each trained prompt group.
        """
        return NOT_TRACED

    def begin_publication(
        self, step: TracedWork, policy_version: int, *, began_ns: int
    ) -> TracedWork:
        """Begin the trace of a step's publication, afterwards."""
        return NOT_TRACED

    def close(self) -> None:
        """Send pending spans, within a few seconds."""
