"""Reads the end of a broker's log, follows it, and explains from it why a broker died."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_events.errors import BrokerError, EnvironmentProblem, RelaxError
from relax_events.kafka.embedded.ports import build_port_error

_TAIL_BYTES = 256 << 10
_PAUSE_SECONDS = 0.25


def read_last_lines(
    path: Path, *, num_lines: int, start_byte: int = 0, end_byte: int | None = None
) -> list[str]:
    """Return the last lines of a range of a log, from the range's last 256 KiB at most; empty when
    the file is missing.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END) if end_byte is None else end_byte
            begin = file.seek(max(start_byte, end - _TAIL_BYTES))
            lines = file.read(max(0, end - begin)).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[-num_lines:] if num_lines > 0 else []


def follow_lines(
    path: Path, *, start_byte: int, ended_within: Callable[[float], bool]
) -> Iterator[str]:
    """Yield the lines that are added to a log until its writer ends, including an incomplete last
    line.

    Files send no notifications, so this polls the file and the writer.

    Args:
        path: The log.
        start_byte: The first byte to read.
        ended_within: Waits up to the given seconds for the writer's end; returns whether it ended.
    """
    rest = ""
    with path.open("r", encoding="utf-8", errors="replace") as file:
        file.seek(start_byte)
        ended = False
        while not ended:
            ended = ended_within(_PAUSE_SECONDS)
            *lines, rest = (rest + file.read()).split("\n")
            yield from lines
    if rest:
        yield rest


_NUM_LINES_SEARCHED = 1000
_NUM_LINES_SHOWN = 15
_STACK = re.compile(r"\s+(at |\.\.\. \d+ )")
_CAUSE = re.compile(r"\b[\w$]+(\.[\w$]+)+(Exception|Error)\b")


def explain_death(
    log: Path, *, port: int, directory: Path, start_byte: int = 0, exit_code: int | None = None
) -> RelaxError:
    """Return the error for a broker whose process died.

    Args:
        log: The broker's log.
        port: The port that it used.
        directory: The broker's directory.
        start_byte: Where the log of this start begins.
        exit_code: Of the process, -N if signal N ended it; None if it is unknown.
    """
    text = "\n".join(read_last_lines(log, num_lines=_NUM_LINES_SEARCHED, start_byte=start_byte))
    if "No space left on device" in text:
        return EnvironmentProblem(
            f"the embedded broker ended because the disk under {directory} is full; free "
            "some space and start it again"
        )
    if "Address already in use" in text:
        return build_port_error(port)
    if exit_code == -signal.SIGKILL:
        return BrokerError(f"the embedded broker in {directory} was killed (SIGKILL); see {log}")
    lines = [line for line in text.splitlines() if not _STACK.match(line)]
    if causes := [line for line in lines if _CAUSE.search(line)]:
        return BrokerError(
            f"the embedded broker in {directory} ended by itself: {causes[-1].strip()}; see {log}"
        )
    tail = "\n".join(f"  {line}" for line in lines[-_NUM_LINES_SHOWN:]) or "  (it printed nothing)"
    how = "ended by itself" if lines or exit_code is not None else "ended, perhaps by a signal"
    return BrokerError(
        f"the embedded broker in {directory} {how}; the last lines of {log}:\n{tail}"
    )
