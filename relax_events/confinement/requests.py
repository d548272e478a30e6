"""A request to a child process, and what becomes of it: a reply, or a loss with its kind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from relax_events.confinement.frames import Buffer, encode_head
from relax_events.errors import ConfigError

Kind = Literal["late", "silent", "died", "invalid", "state_lost", "unloaded", "changed", "closed"]


class ChildLost(Exception):
    """A request has no answer: its child was late, silent or died, broke the protocol, lost the
    request's state with another one, could not be loaded, or the pool was closed.
    """

    def __init__(
        self, kind: Kind, ending: str, *, seconds: float = 0.0, was_loaded: bool = True
    ) -> None:
        """Describe the loss.

        Args:
            kind: What happened.
            ending: The exit code or signal, the broken rule, or why the child can't be loaded.
            seconds: The deadline that was missed.
            was_loaded: Whether the child was ready for requests before.
        """
        super().__init__(kind, ending)
        self.kind, self.ending, self.seconds = kind, ending, seconds
        self.was_loaded = was_loaded

    @property
    def is_late(self) -> bool:
        """Whether a deadline was missed."""
        return self.kind in ("late", "silent")

    def describe(self, limit: str) -> str:
        """Return what happened, to follow the name of what ran in the child.

        Args:
            limit: The key of the deadline in a run file.
        """
        match self.kind:
            case "late" if not self.was_loaded:
                return f"took longer than {self.seconds:g} s to load"
            case "died" if not self.was_loaded:
                return f"died ({self.ending}) before it was loaded"
            case "late":
                return f"took longer than {self.seconds:g} s" + (f" ({limit})" if limit else "")
            case "silent":
                return f"was silent for {self.seconds:g} s"
            case "invalid":
                return f"sent {self.ending}"
            case "died":
                return f"died ({self.ending})"
            case "state_lost":
                return "was lost with a request of others"
            case _:
                return self.ending

    def as_load_error(self, name: str, *, see: str) -> ConfigError:
        """Return the error of a child that can't be loaded.

        Args:
            name: What runs in the child.
            see: The keys of a run file that have to do with it.
        """
        if self.kind == "unloaded":  # it says itself why
            return ConfigError(self.ending)
        return ConfigError(f"{name} {self.describe('')}; see {see}")


@dataclass(slots=True)
class Reply:
    """The answer to a request; `child` identifies the process that gave it."""

    head: dict[str, Any]
    contents: list[bytes]
    child: int


Result = Reply | ChildLost


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request that waits or runs.

    Attributes:
        head: For the child, as JSON.
        contents: Bytes that follow it.
        seconds: Its deadline, from when the child can work on it.
        on_done: Receives the answer or the loss, in the driver's thread.
        slot: The child that it is for, by position in the pool; None for any.
        child: The only process that may get it, if it belongs to that one's state.
        is_alone: Whether nothing else may run in the child at the same time: it is one of
            several that ran in a child which was lost.
        started: When the child could begin with it, on the monotonic clock.
    """

    head: Mapping[str, Any]
    contents: Sequence[Buffer] = ()
    seconds: float
    on_done: Callable[[Result], None]
    slot: int | None = None
    child: int | None = None
    is_alone: bool = False
    started: float = 0.0
    line: bytes = field(init=False)
    """The head as it is sent."""

    def __post_init__(self) -> None:
        """Encode the head, so that what can't be sent fails where it comes from."""
        self.line = encode_head(self.head, self.contents)


def describe_exit(code: int) -> str:
    """Return an exit code as `subprocess` gives it, readable."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
