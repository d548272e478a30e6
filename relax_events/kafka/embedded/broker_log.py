"""Read the end of a broker's log, once or as it grows.

Turn the log of a broker that ended into an error that a person can act upon.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_events.errors import BrokerError, EnvironmentProblem, RelaxError
from relax_events.kafka.embedded.ports import port_taken

_TAIL_BYTES = 256 << 10
_PAUSE_SECONDS = 0.25


def last_lines(
    path: Path, *, num_lines: int, start_byte: int = 0, end_byte: int | None = None
) -> list[str]:
    """Return the last lines of a part of a log, from that part's last 256 KiB at most; empty when
    there is no file.
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
    """Yield the lines that are added to a log until its writer ends; a last line without line end
    comes as it is.

    A growing file calls nobody, so this looks again after each short wait for the end of the
    writer.

    Args:
        path: The log.
        start_byte: Where to begin.
        ended_within: Waits so many seconds for the end of the writer, and tells whether it came.
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


def explain_death(log: Path, *, port: int, directory: Path, start_byte: int = 0) -> RelaxError:
    """Return the error for a broker whose process ended by itself.

    Args:
        log: What it printed.
        port: Where it listened or tried to.
        directory: Where it lived.
        start_byte: Where its own part of the log begins; earlier lines are of brokers before it.
    """
    text = "\n".join(last_lines(log, num_lines=_NUM_LINES_SEARCHED, start_byte=start_byte))
    if "No space left on device" in text:
        return EnvironmentProblem(
            f"the embedded broker ended because the disk under {directory} is full; free "
            "some space and start it again"
        )
    if "Address already in use" in text:
        return port_taken(port)
    lines = [line for line in text.splitlines() if not _STACK.match(line)]
    if causes := [line for line in lines if _CAUSE.search(line)]:
        return BrokerError(
            f"the embedded broker in {directory} ended by itself: {causes[-1].strip()}; see {log}"
        )
    tail = "\n".join(f"  {line}" for line in lines[-_NUM_LINES_SHOWN:]) or "  (it printed nothing)"
    return BrokerError(
        f"the embedded broker in {directory} ended by itself; the last lines of {log}:\n{tail}"
    )
