"""Several roles' workers in one process, each in a thread of its own.

    main thread    signals, the end of each worker <──┐
    role's thread  one worker: its consumer group, heartbeats, records, metrics

Each worker is what it would be in a process of its own, with the same records on the log. What a
process has once belongs to the host: signals, the log's stream, and models that two roles share.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import structlog

from relax_events.config import RunConfig
from relax_events.runtime.drain import Drain
from relax_events.telemetry.logs import configure_logs

Start = Callable[..., None]
SEPARATOR = "+"
"""Between the roles of a process, as in `reference+actor-forward`."""


class Host:
    """What the workers of a process share."""

    def __init__(self, drain: Drain) -> None:
        """Start without a worker.

        Args:
            drain: Of the process; its start drains every worker.
        """
        self.drain = drain
        self._lock = threading.Lock()
        self._shared: dict[Hashable, Any] = {}

    def share(self, key: Hashable, open_it: Callable[[], Any]) -> Any:
        """Return what a worker has opened under a key, and open it for the first."""
        with self._lock:
            if key not in self._shared:
                self._shared[key] = open_it()
            return self._shared[key]


_host: contextvars.ContextVar[Host | None] = contextvars.ContextVar("host", default=None)


def current_host() -> Host | None:
    """Return the host of the calling thread's worker; None where a process has one worker."""
    return _host.get()


def host_workers(starts: Mapping[str, Start], config: RunConfig, *, index: int) -> None:
    """Run a worker of each role until all have ended.

    Args:
        starts: What runs each role.
        config: The run. Where it names a port for metrics, the second worker takes the next one.
        index: Of each worker among the workers of its role.
    Raises:
        BaseException: The first error of a worker. The process must end with it: other workers
            still run.
    """
    name = SEPARATOR.join(starts)
    worker_id = SEPARATOR.join(f"{role}-{index}" for role in starts)
    configure_logs(config.telemetry, role=name, worker_id=worker_id, run_id=config.run.id)
    host = Host(Drain(seconds=config.workers.drain_seconds))
    host.drain.listen_to_signals()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(role: str, start: Start, settings: RunConfig) -> None:
        _host.set(host)
        structlog.contextvars.bind_contextvars(role=role, worker_id=f"{role}-{index}")
        try:
            start(settings, index=index)
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    for number, (role, start) in enumerate(starts.items()):
        port = config.telemetry.worker_port(number)
        telemetry = config.telemetry.model_copy(update={"metrics_port": port})
        worker_config = config.model_copy(update={"telemetry": telemetry})
        threading.Thread(
            target=run, args=(role, start, worker_config), name=role, daemon=True
        ).start()
    for _ in starts:
        if (error := ended.get()) is not None:
            raise error
