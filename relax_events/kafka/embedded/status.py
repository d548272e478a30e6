"""The status of an embedded broker, for `relax broker status`."""

import time
from dataclasses import dataclass
from pathlib import Path

from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.embedded.directory import BROKER_START, BrokerState

_MIB = 1 << 20
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own


@dataclass(frozen=True)
class BrokerStatus:
    """A broker's status; values that are unknown while it is down, or before its first start, are
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

    def describe(self) -> dict[str, str]:
        """Return the status for people, by name."""
        return {
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
            else "its last user leaves",
            "used by": ", ".join(f"process {pid}" for pid in self.users) or "none",
            "records on disk": f"{self.disk_bytes / _MIB:.2f} MiB",
            "size of broker.log": f"{self.log_bytes / _MIB:.2f} MiB",
            "directory": self.directory,
        }


def read_broker_status(directory: Path) -> BrokerStatus:
    """Read the status of the broker in a directory, which need not exist. Nothing is started or
    changed.
    """
    broker = EmbeddedBroker(directory)
    state = broker.state
    pid = broker.pid
    started = None if state is None or pid is None else state.started_at_seconds
    return BrokerStatus(
        directory=str(broker.directory),
        running=pid is not None,
        bootstrap_servers=None if state is None else broker.bootstrap_servers,
        pid=pid,
        started_by=None if state is None or pid is None else state.started_by,
        users=broker.users,
        login=None if state is None else _describe_login(state, broker.password_file),
        kafka_version=None if state is None else state.kafka_version,
        uptime_seconds=None if started is None else max(0.0, time.time() - started),
        log_bytes=broker.log_path.stat().st_size if broker.log_path.exists() else 0,
        disk_bytes=_disk_bytes(broker.directory / "data"),
    )


def _describe_login(state: BrokerState, password_file: Path | None) -> str:
    if state.credentials is not None:
        return f"as principals of {state.credentials}"
    return (
        f"with the password in {password_file}"
        if password_file
        else "no: every user of this machine may connect"
    )


def _disk_bytes(folder: Path) -> int:
    """Sum the allocated blocks of all files, because Kafka's index files are sparse. Files that are
    deleted meanwhile are skipped.
    """
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
    return total
