"""`relax health`: checks workers. For one worker it loads the standard library alone,
since containers ask every few seconds.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.cli.parameters import BrokerOptions
    from relax_events.events.types import WorkerHeartbeat

VARIABLE = "RELAX_TELEMETRY__METRICS_PORT"
ANSWER_SECONDS = 3.0
ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  nothing is bound here: a worker that serves on all of them is asked on the loopback


def health(
    run: str = "",
    *,
    port: int = 0,
    ready: bool = False,
    config: Path | None = None,
    bootstrap_servers: str = "",
    directory: Path = Path(".relax"),
    output: Literal["table", "json"] = "table",
) -> None:
    """Ask a worker on this machine, or all workers of a run, whether their work loops are alive;
    exit code 6 when one is not.

    Example: relax health quickstart

    Args:
        run: Id of the run whose workers are meant, or its run file; without it one worker is
            checked.
        port: Where that worker serves its metrics; 0 takes RELAX_TELEMETRY__METRICS_PORT from the
            environment.
        ready: Ask whether it takes work instead: it knows a policy version and does not drain.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: Of a run, a table to read, or JSON for programs.
    """
    if run:
        from relax_events.cli.parameters import BrokerOptions

        broker = BrokerOptions(
            config=config, bootstrap_servers=bootstrap_servers, directory=directory
        )
        _show_workers(run, broker, ready=ready, output=output)
        return
    port = port or int(os.environ.get(VARIABLE) or 0)
    if not port:
        raise ConfigError(
            f"no port is given to ask a worker at; give --port, or set {VARIABLE} as for the "
            "worker; or name a run"
        )
    print(ask(port, ready=ready))


def ask(port: int, *, ready: bool, host: str = "127.0.0.1") -> str:
    """Return a worker's answer about its health.

    Args:
        port: Where it serves its metrics.
        ready: Check readiness instead of liveness.
        host: Its address.
    Raises:
        CheckFailed: The worker is unhealthy, or does not answer.
    """
    path = "/readyz" if ready else "/healthz"
    what = f"{host}:{port}{path}"
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            with connection.makefile(
                "r", encoding="latin-1"
            ) as answer:  # read to its end, or the worker would log that we hung up
                head, _, body = answer.read().partition("\n\n")
    except OSError as error:
        raise CheckFailed(
            f"{what} does not answer: {error}; the worker still starts, or hangs"
        ) from None
    if head.split(" ", 2)[1:2] != ["200"]:
        raise CheckFailed(f"{what} answers {body.strip() or 'nothing'}; see the worker's log")
    return body.strip()


def _show_workers(
    run: str, broker: BrokerOptions, *, ready: bool, output: Literal["table", "json"]
) -> None:
    """Show the workers that a run should have and those with a recent heartbeat: each one's answer,
    or on another host how old its heartbeat is.
    """
    from relax_events.cli.output import print_rows
    from relax_events.history.live_run import RunFollower

    with broker.open_run(run, name="health") as settings:
        with RunFollower(settings, name="health") as watch, watch.lock:
            alive, newest = watch.alive(), dict(watch.state.workers)
        address = settings.telemetry.metrics_host
    host = "127.0.0.1" if address in ALL_ADDRESSES else address
    configured = [
        f"{role}-{index}" for role, count in settings.roles().items() for index in range(count)
    ]
    rows = []
    for worker_id in dict.fromkeys([*configured, *sorted(alive)]):
        heartbeat = newest.get(worker_id)
        is_well, text = _check_worker(alive.get(worker_id), host, ready=ready)
        where = (
            [heartbeat.host, heartbeat.pid, heartbeat.metrics_port]
            if heartbeat is not None and worker_id in alive
            else [None, None, None]
        )
        rows.append([worker_id, is_well, *where, text])
    print_rows(["worker", "healthy", "host", "pid", "port", "answer"], rows, output)
    if unwell := [row[0] for row in rows if not row[1]]:
        raise CheckFailed(
            f"{len(unwell)} of {len(rows)} workers are not "
            f"{'ready' if ready else 'healthy'}: {', '.join(map(str, unwell))}"
        )


def _check_worker(heartbeat: WorkerHeartbeat | None, host: str, *, ready: bool) -> tuple[bool, str]:
    if heartbeat is None:
        return False, "no heartbeat of late"
    if heartbeat.host != socket.gethostname():
        return (
            True,
            (
                f"heartbeat {max(0.0, time.time() - heartbeat.sent_at / 1e6):.1f} s ago, "
                f"{heartbeat.state.value}"
            ),
        )
    try:
        return True, ask(heartbeat.metrics_port, ready=ready, host=host)
    except CheckFailed as error:
        return False, str(error)
