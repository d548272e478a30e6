"""What a broker's directory remembers of it, in `broker.json`: which process, which ports, which version."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_events.errors import EnvironmentProblem

BROKER_START = "relax broker start"
PASSWORD, OPEN = "password", "open"
"""How clients log in: with the password of the folder, or not at all."""


@dataclass(frozen=True)
class BrokerState:
    """One broker as last recorded; ports outlive the process so that a restart is found by running clients.

    `credentials` is the security folder of a secured broker, which has a listener of its own for itself, `internal_port`.
    `login` is how clients log in to one without `credentials`; empty where the node does not know the folder's password yet.
    `started_by` is the command that brought the broker up; what `relax broker start` brought up runs on when nobody uses it.
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
    started_by: str = ""
    login: str = ""

    @property
    def stays(self) -> bool:
        """Whether the broker runs until it is stopped, and not only as long as somebody uses it."""
        return self.started_by == BROKER_START


def read_state(path: Path) -> BrokerState | None:
    """Return what was recorded, None when nothing ever was.

    Raises:
        EnvironmentProblem: The file is there and is not ours to read, or to understand.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentProblem(f"what is known of the embedded broker can't be read: {error}; it needs a folder of this user's") from error
    try:
        return BrokerState(**json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(
            f"{path} does not describe a broker: {error}; if no broker runs there, delete that file (the records in data/ stay)"
        ) from error


def write_state(path: Path, state: BrokerState) -> None:
    """Record a state; a reader sees the old file or the new one, never half of one."""
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
