"""The sessions of a run in its folder: start and end of each `relax run`, and whether another one
is active.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import orjson

from relax_events.events.parts import now_micros

SESSIONS_FILE = "sessions.jsonl"


@dataclass(frozen=True, slots=True)
class Session:
    """One `relax run`; times in microseconds since the epoch.

    Attributes:
        ended_at: None while it runs, and where it was killed.
    """

    pid: int
    host: str
    started_at: int
    ended_at: int | None = None


class RunSessions(AbstractContextManager["RunSessions"]):
    """Records that this process works on the run; a lock that ends with the process shows others
    that it is active.
    """

    def __init__(self, folder: Path) -> None:
        """Read and write nothing yet.

        Args:
            folder: Of the run.
        """
        self._path = folder / SESSIONS_FILE
        self._file: IO[bytes] | None = None
        self._session = Session(os.getpid(), socket.gethostname(), now_micros())
        self.earlier: list[Session] = []
        """Oldest first."""
        self.others: list[Session] = []
        """Sessions that may be active now; empty where this one is alone."""

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b", buffering=0)
        is_alone = _lock(self._file)
        self._file.seek(0)
        self.earlier = parse_sessions(self._file.read())
        self.others = (
            []
            if is_alone
            else [session for session in self.earlier if session.ended_at is None][-1:]
        )
        self._file.write(_line(self._session))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # the disk may be full; the session then counts as killed
                self._file.write(_line(replace(self._session, ended_at=now_micros())))
            self._file.close()

    @property
    def lock(self) -> tuple[int, ...]:
        """The descriptor of the file that is locked while this session works; where other processes
        hold it, too, until the last of them has ended.
        """
        return (self._file.fileno(),) if self._file is not None else ()

    def is_alone(self) -> bool:
        """Return whether no other session is active."""
        return self._file is not None and _lock(self._file)

    def total_seconds(self, wall_seconds: float, commits: Sequence[int]) -> float:
        """Return how long all sessions took together, this one included.

        Args:
            wall_seconds: How long this one took.
            commits: When train steps were committed. A session that was killed counts up to its
                last one.
        """
        return wall_seconds + sum(
            session_seconds(self.earlier, commits, until=self._session.started_at)
        )


def find_active(folder: Path) -> Session | None:
    """Return a session that works on a run now; None where none does.

    Args:
        folder: Of the run.
    """
    with suppress(FileNotFoundError), (folder / SESSIONS_FILE).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sessions = parse_sessions(file.read())
            return next((one for one in reversed(sessions) if one.ended_at is None), None)
    return None


def _lock(file: IO[bytes]) -> bool:
    """Take a lock that all sessions of the run share; return whether no other session holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except BlockingIOError:
        is_alone = False
    fcntl.flock(file, fcntl.LOCK_SH)
    return is_alone


def _line(session: Session) -> bytes:
    return orjson.dumps(asdict(session)) + b"\n"


def parse_sessions(content: bytes) -> list[Session]:
    """Parse the sessions from the file's content, oldest first: each has a line for its start, and
    usually one for its end.
    """
    sessions: dict[tuple[str, int, int], Session] = {}
    for line in content.splitlines():
        with suppress(
            orjson.JSONDecodeError, TypeError
        ):  # a line that was truncated by a full disk
            session = Session(**orjson.loads(line))
            sessions[session.host, session.pid, session.started_at] = session
    return sorted(sessions.values(), key=lambda session: session.started_at)


def session_seconds(
    sessions: Sequence[Session], commits: Sequence[int], *, until: int
) -> list[float]:
    """Return how long each session took; a session that was killed counts up to the last step
    before the next one started.

    Args:
        sessions: Oldest first.
        commits: When train steps were committed.
        until: Start of the session that follows them all.
    """
    nexts = [*(later.started_at for later in sessions[1:]), until]
    ends = [
        session.ended_at
        or max(
            (at for at in commits if session.started_at <= at < after), default=session.started_at
        )
        for session, after in zip(
            sessions, nexts, strict=False
        )  # without any session there is only the end
    ]
    return [
        max(0, end - session.started_at) / 1e6 for session, end in zip(sessions, ends, strict=True)
    ]
