"""What a broker's directory remembers of it, in `broker.json`: which process, which ports, which version."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_events.errors import EnvironmentProblem


@dataclass(frozen=True)
class BrokerState:
    """One broker as last recorded; ports outlive the process so that a restart is found by running clients.

    `credentials` is the security folder of a secured broker, which has a listener of its own for itself, `internal_port`.
    """

    port: int
    controller_port: int
    kafka_version: str
    pid: int | None = None
    started_at_seconds: float | None = None
    archive_at_exit: str | None = None
    log_start_byte: int = 0
    internal_port: int = 0
    credentials: str | None = None


def read_state(path: Path) -> BrokerState | None:
    """Return what was recorded, None when nothing ever was.

    Raises:
        EnvironmentProblem: The file is there and is not ours to understand.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return BrokerState(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise EnvironmentProblem(
            f"{path} does not describe a broker: {error}; if no broker runs there, delete that file (the records in data/ stay)"
        ) from error


def write_state(path: Path, state: BrokerState) -> None:
    """Record a state; a reader sees the old file or the new one, never half of one."""
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
