"""What roles say of the work that they do for a prompt group. Here nobody listens: each call costs
a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

Value = str | bool | int | float | Sequence[str] | Sequence[int]
NO_HEADERS: Mapping[str, str] = {}
NO_ATTRIBUTES: Mapping[str, Value] = {}


class ReadRecord(Protocol):
    """What a trace wants to know of a record that was read."""

    @property
    def topic(self) -> str:
        """Its topic."""

    @property
    def partition(self) -> int:
        """Its partition."""

    @property
    def offset(self) -> int:
        """Its offset."""

    @property
    def key(self) -> str:
        """The prompt group that it belongs to."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers."""

    @property
    def timestamp_ms(self) -> int:
        """When it was written."""


class TracedWork:
    """Work that has begun."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that carry its context."""
        return NO_HEADERS

    def end(self, facts: Mapping[str, Value] = NO_ATTRIBUTES, *, error: str = "") -> None:
        """Say that it is over, what there is to say about it, and the error where it failed."""


NOT_TRACED = TracedWork()


class Traces:
    """The prompt groups that a worker has at hand. Used by the thread of its work loop."""

    def add_record(self, record: ReadRecord) -> None:
        """Note the context that a record carries for its prompt group."""

    def get_headers(self, prompt_group_id: str) -> Mapping[str, str]:
        """Return the headers of the records that are written for a prompt group."""
        return NO_HEADERS

    def begin_group(
        self, prompt_group_id: str, *, topic: str, instead_of: str = "", **facts: Value
    ) -> TracedWork:
        """Begin a prompt group's trace, if it is among those that are traced.

        Args:
            prompt_group_id: What is issued.
            topic: Where to, without the run.
            instead_of: The attempt that ended untrained, which this one follows.
            facts: What there is to say about it.
        """
        return NOT_TRACED

    def record_wait(self, prompt_group_id: str, topic: str) -> None:
        """Say that a prompt group's records of this topic waited until now, since the first of them
        was written.
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
            operation: What is done, a verb.
            prompt_group_id: For whom.
            topic: Of the records that it is done on, without the run.
            train_step: The step that it is part of.
            facts: What there is to say about it.
        """
        return NOT_TRACED

    @contextmanager
    def trace_groups(
        self, operation: str, prompt_group_ids: Iterable[str], *, topic: str
    ) -> Iterator[None]:
        """Work on several prompt groups at a time, in the body; what it raises ends their work as
        failed.
        """
        yield

    def record_group_end(self, prompt_group_id: str, *, outcome: str, reason: str) -> None:
        """Say that a prompt group ended untrained."""

    def begin_train_step(self, train_step: int, *, began_ns: int, headers: Iterable[Mapping[str, str]]) -> TracedWork:
        """Begin a train step's trace, afterwards: it is known by then which prompt groups it
        trained.

        Args:
            train_step: Its number.
            began_ns: When it began, in nanoseconds since the epoch.
            headers: The context of each prompt group that it trained.
        """
        return NOT_TRACED

    def begin_publication(self, step: TracedWork, policy_version: int, *, began_ns: int) -> TracedWork:
        """Begin the publication of what a step made, afterwards."""
        return NOT_TRACED

    def close(self) -> None:
        """Send what is left, within a few seconds."""
