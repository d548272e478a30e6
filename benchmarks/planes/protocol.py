"""What a data plane offers to the benchmark, and what one measurement asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

UNDER_WAY = 64  # samples that a streaming writer may have unacknowledged


class Got(NamedTuple):
    """A sample as it came out of the plane, decoded: which one, and when it was put (microseconds
    since the epoch)."""

    row: int
    ready_at: int


@dataclass(frozen=True)
class Cell:
    """One thing that is measured.

    `batch` samples are put at once, and each put is acknowledged before the next begins. A
    streaming writer puts one by one and doesn't wait, with at most 64 unacknowledged. A paced one
    puts one sample every `1 / per_second`. Readers poll up to `batch` samples at a time; each of
    the `num_readers` gets every sample.
    """

    name: str
    num_tokens: int
    batch: int = 1
    num_readers: int = 1
    is_streaming: bool = False
    per_second: float = 0.0

    @property
    def read_batch(self) -> int:
        """How many samples a reader takes at a time."""
        return UNDER_WAY if self.is_streaming else self.batch


class Writer(Protocol):
    """Puts samples into a channel that it makes when it is opened."""

    def put(self, rows: Sequence[int], ready_at: int) -> None:
        """Put these samples and return when they are acknowledged."""

    def stream(self, num_samples: int) -> None:
        """Put samples one by one without waiting for each; return when all are acknowledged."""

    def drop(self) -> None:
        """Delete the channel with its contents, and disconnect."""


class Reader(Protocol):
    """Takes samples from a channel as a named consumer; who comes after it under the same name goes
    on where it ended."""

    def get(self, max_samples: int, *, timeout_seconds: float) -> list[Got]:
        """Return decoded samples as soon as there are some, and acknowledge them to the plane
        with."""

    def take(self, max_samples: int, *, timeout_seconds: float) -> int:
        """Fetch samples without saying that they are done with, as a consumer that dies at work;
        return how many."""

    def close(self) -> None:
        """Leave."""


class Server(Protocol):
    """The process, or processes, that hold the samples between writers and readers."""

    address: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables that its clients need."""

    def start(self) -> None:
        """Come up, at the same address when it was killed before."""

    def pids(self) -> list[int]:
        """Return the processes whose time is the plane's own."""

    def kill_storage(self) -> None:
        """Kill a process that holds samples, as a crash would (SIGKILL)."""

    def stop(self) -> None:
        """End all that was started."""


class Plane(Protocol):
    """A module that knows one data plane."""

    def open_writer(self, address: str, channel: str, num_tokens: int) -> Writer:
        """Make a channel and return what puts samples into it."""

    def open_reader(self, address: str, channel: str, consumer: str) -> Reader:
        """Return a consumer that is ready to get what is put from now on."""
