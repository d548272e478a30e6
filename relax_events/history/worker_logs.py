"""The logs of a run's workers as readable lines: merged by time, and as they are written."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

import orjson

from relax_events.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
CONTEXT = frozenset({"event", "level", "timestamp", "role", "worker_id", "run_id", "exception"})
"""Parts of a log event that are shown elsewhere in a line, or that all lines of a log share."""
MAX_LINE = 10_000
"""Maximum characters of a line: a reward function may print without end."""
IN_MODIFY, IN_MOVED_TO, IN_CREATE, IN_CLOEXEC = 0x2, 0x80, 0x100, 0o2000000
EVENT_BYTES = BLOCK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log.

    Attributes:
        worker: Its writer, by the name of its file.
        at: ISO 8601, UTC; of a line without a time, that of the line before it in the same log.
        level: One of `LEVELS`; empty for a line that is no log event, such as a traceback or
            printed text.
        text: The readable text.
    """

    worker: str
    at: str
    level: str
    text: str

    def __str__(self) -> str:
        """Format the line for a terminal."""
        return (
            f"{self.at[:19].replace('T', ' '):<19}  {self.worker:<15}  {self.level:<8}  {self.text}"
        ).rstrip()


class LogParser:
    """Parses the lines of one log, in their order."""

    def __init__(self, worker: str) -> None:
        """Start at the beginning of a log, or anywhere in it."""
        self._worker, self._at = worker, ""

    def parse_line(self, raw: bytes) -> LogLine | None:
        """Return a line; None for an empty one."""
        text = raw[: 4 * MAX_LINE].decode(errors="replace").rstrip("\r\n")
        if not text.strip():
            return None
        with suppress(orjson.JSONDecodeError):
            event = orjson.loads(raw)
            if isinstance(event, dict) and "event" in event:
                self._at = str(event.get("timestamp") or self._at)
                return LogLine(
                    self._worker,
                    self._at,
                    str(event.get("level") or "info"),
                    _readable(event)[:MAX_LINE],
                )
        return LogLine(self._worker, self._at, "", text[:MAX_LINE])


def _readable(event: Mapping[str, object]) -> str:
    parts = [
        str(event["event"]),
        *(f"{name}={_value(value)}" for name, value in event.items() if name not in CONTEXT),
    ]
    return " ".join(parts) + (f"\n{event['exception']}" if "exception" in event else "")


def _value(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return orjson.dumps(text).decode() if " " in text or not text else text


def log_files(folder: Path, workers: Collection[str] = ()) -> dict[str, Path]:
    """Return a run's logs by writer: workers, `run` (`relax run` itself) and `starter`.

    Args:
        folder: Of the logs.
        workers: Ids or roles of the wanted logs; none stands for all.
    Raises:
        ConfigError: There are none, or a wanted one is missing.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not files:
        raise ConfigError(
            f"there are no logs in {folder}; give the id of a run that was started from this "
            "folder, or its run file"
        )
    if unknown := [
        worker for worker in workers if not any(_belongs_to(name, [worker]) for name in files)
    ]:
        raise ConfigError(
            f"there is no log of {unknown[0]} in {folder}; there are {', '.join(files)}"
        )
    return {name: path for name, path in files.items() if _belongs_to(name, workers)}


def _belongs_to(name: str, workers: Collection[str]) -> bool:
    return not workers or name in workers or name.rpartition("-")[0] in workers


def read_lines(
    files: Mapping[str, Path], *, ends: Mapping[str, int] | None = None
) -> Iterator[LogLine]:
    """Read the lines of several logs in order of time.

    Args:
        files: As from `log_files`.
        ends: End position of each file; by default its end.
    """
    stops = ends or {}
    return merge(
        *(_read_file(name, path, end=stops.get(name)) for name, path in files.items()),
        key=lambda line: line.at,
    )


def _read_file(name: str, path: Path, *, end: int | None) -> Iterator[LogLine]:
    parser, position = LogParser(name), 0
    with path.open("rb") as file:
        for raw in file:
            position += len(raw)
            if end is not None and position > end:
                return
            if (line := parser.parse_line(raw)) is not None:
                yield line


def _end_of_last_line(path: Path) -> int:
    """Return the position after the last complete line of a file."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            if (newline := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + newline + 1
            end = begin
    return 0


def filter_by_level(lines: Iterable[LogLine], level: str) -> Iterator[LogLine]:
    """Filter log events below a level; other lines stay, since a traceback is one of them."""
    least = LEVELS.index(level)
    return (line for line in lines if line.level not in LEVELS or LEVELS.index(line.level) >= least)


class LogTail:
    """Follows the logs in a folder from their current ends, including future files. The kernel
    reports when one has grown.
    """

    def __init__(self, folder: Path, workers: Sequence[str] = ()) -> None:
        """Watch from now on.

        Args:
            folder: Of the logs.
            workers: As for `log_files`.
        Raises:
            ConfigError: As for `log_files`; or the kernel has no watch left.
        """
        self._folder, self._workers = folder, tuple(workers)
        self._parsers: dict[str, LogParser] = {}
        self._watch = _open_watch(folder)
        self.ends: dict[str, int] = {
            name: _end_of_last_line(path) for name, path in log_files(folder, workers).items()
        }
        """The end of each log when the watch started."""

    def lines(self) -> Iterator[LogLine]:
        """Yield complete lines as they are written; never ends."""
        while True:
            written = [
                line
                for name, path in log_files(self._folder, self._workers).items()
                for line in self._read_new(name, path)
            ]
            yield from sorted(written, key=lambda line: line.at)
            select.select([self._watch], [], [])
            os.read(self._watch, EVENT_BYTES)

    def _read_new(self, name: str, path: Path) -> Iterator[LogLine]:
        parser = self._parsers.setdefault(name, LogParser(name))
        with path.open("rb") as file:
            file.seek(self.ends.get(name, 0))
            for raw in file:
                if not raw.endswith(b"\n"):
                    break  # an incomplete line
                self.ends[name] = self.ends.get(name, 0) + len(raw)
                if (line := parser.parse_line(raw)) is not None:
                    yield line

    def close(self) -> None:
        """Stop watching."""
        os.close(self._watch)


def _open_watch(folder: Path) -> int:
    """Return a descriptor that becomes readable whenever a file in the folder is new or has grown
    (inotify).
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(IN_CLOEXEC)
    if (
        descriptor < 0
        or library.inotify_add_watch(
            descriptor, os.fsencode(folder), IN_MODIFY | IN_CREATE | IN_MOVED_TO
        )
        < 0
    ):
        raise ConfigError(
            f"{folder} can't be watched: {os.strerror(ctypes.get_errno())}; leave --follow out"
        )
    return int(descriptor)
