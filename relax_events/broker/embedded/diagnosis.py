"""Turn the log of a broker that ended into an error that a person can act upon."""

import re
from pathlib import Path

from relax_events.broker.embedded.logs import last_lines
from relax_events.broker.embedded.ports import port_taken
from relax_events.errors import BrokerError, EnvironmentProblem, RelaxError

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
        return EnvironmentProblem(f"the embedded broker ended because the disk under {directory} is full; free some space and start it again")
    if "Address already in use" in text:
        return port_taken(port)
    lines = [line for line in text.splitlines() if not _STACK.match(line)]
    if causes := [line for line in lines if _CAUSE.search(line)]:
        return BrokerError(f"the embedded broker in {directory} ended by itself: {causes[-1].strip()}; see {log}")
    tail = "\n".join(f"  {line}" for line in lines[-_NUM_LINES_SHOWN:]) or "  (it printed nothing)"
    return BrokerError(f"the embedded broker in {directory} ended by itself; the last lines of {log}:\n{tail}")
