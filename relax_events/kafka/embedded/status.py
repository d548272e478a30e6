"""What `relax broker status` tells about a broker, as a value, a table or JSON."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.embedded.directory import BROKER_START, BrokerState

_MIB = 1 << 20
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own


@dataclass(frozen=True)
class BrokerReport:
    """One look at a broker; what is unknown while it is down, or before its first start, is
    None.
    """

    directory: str
    running: bool
    bootstrap_servers: str | None
    pid: int | None
    started_by: str | None
    users: list[int]
    login: str | None
    kafka_version: str | None
    uptime_seconds: float | None
    log_bytes: int
    disk_bytes: int

    def as_json(self) -> str:
        """Return one JSON object, keys as the fields."""
        return json.dumps(asdict(self))

    def as_text(self) -> str:
        """Return one aligned line per field for a person to read."""
        rows = {
            "state": "running" if self.running else "down",
            "bootstrap servers": self.bootstrap_servers or "-",
            "clients log in": self.login or "-",
            "pid": "-" if self.pid is None else str(self.pid),
            "Kafka version": self.kafka_version or "-",
            "uptime": "-" if self.uptime_seconds is None else f"{self.uptime_seconds:.0f} s",
            "started by": self.started_by or "-",
            "runs until": "-"
            if not self.running
            else "relax broker stop"
            if self.started_by == BROKER_START
            else "nobody uses it",
            "used by": ", ".join(f"process {pid}" for pid in self.users) or "nobody",
            "records on disk": f"{self.disk_bytes / _MIB:.2f} MiB",
            "size of broker.log": f"{self.log_bytes / _MIB:.2f} MiB",
            "directory": self.directory,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def broker_report(directory: Path) -> BrokerReport:
    """Look at the broker of a directory, which need not exist; nothing is started or changed."""
    broker = EmbeddedBroker(directory)
    state = broker.state
    pid = broker.pid
    started = None if state is None or pid is None else state.started_at_seconds
    return BrokerReport(
        directory=str(broker.directory),
        running=pid is not None,
        bootstrap_servers=None if state is None else broker.bootstrap_servers,
        pid=pid,
        started_by=None if state is None or pid is None else state.started_by,
        users=broker.users,
        login=None if state is None else _login(state, broker.password_file),
        kafka_version=None if state is None else state.kafka_version,
        uptime_seconds=None if started is None else max(0.0, time.time() - started),
        log_bytes=broker.log_path.stat().st_size if broker.log_path.exists() else 0,
        disk_bytes=_disk_bytes(broker.directory / "data"),
    )


def _login(state: BrokerState, password_file: Path | None) -> str:
    if state.credentials is not None:
        return f"as principals of {state.credentials}"
    return (
        f"with the password in {password_file}"
        if password_file
        else "no: every user of this machine may use it"
    )


def _disk_bytes(folder: Path) -> int:
    """Sum what files really take, since Kafka's index files are sparse; a file deleted meanwhile
    counts nothing.
    """
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
    return total
