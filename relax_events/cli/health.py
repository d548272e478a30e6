"""`relax health`: asks a worker on this machine how it is. Loads the standard library alone, since containers ask every few seconds."""

from __future__ import annotations

import os
import socket

from relax_events.errors import CheckFailed, ConfigError

VARIABLE = "RELAX_TELEMETRY__METRICS_PORT"
ANSWER_SECONDS = 3.0


def health(*, port: int = 0, ready: bool = False) -> None:
    """Ask a worker on this machine whether its work loop is alive; exit code 6 when it is not.

    Example: relax health --port 9100

    Args:
        port: Where it serves its metrics; 0 takes RELAX_TELEMETRY__METRICS_PORT from the environment.
        ready: Ask whether it takes work instead: it knows a policy version and does not drain.
    """
    port = port or int(os.environ.get(VARIABLE) or 0)
    if not port:
        raise ConfigError(f"no port is given to ask a worker at; give --port, or set {VARIABLE} as for the worker")
    path = "/readyz" if ready else "/healthz"
    what = f"127.0.0.1:{port}{path}"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            with connection.makefile("r", encoding="latin-1") as answer:  # read to its end, or the worker would log that we hung up
                head, _, body = answer.read().partition("\n\n")
    except OSError as error:
        raise CheckFailed(f"{what} does not answer: {error}; the worker still starts, or hangs") from None
    if head.split(" ", 2)[1:2] != ["200"]:
        raise CheckFailed(f"{what} says {body.strip() or 'nothing'}; see the worker's log")
    print("ok")
