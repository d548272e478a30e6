"""The starter: imports what workers need, and becomes one of them for each order. It computes
nothing and has no thread, so that it can be forked.

Started by the supervisor alone; it ends with it. What it has started goes on without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from setproctitle import setproctitle

from relax_events.launcher.fork_protocol import SpawnRequest, receive, send


def main() -> None:
    """Serve the supervisor at the other end of the descriptor in the command line, until it is
    gone; in a worker, be that worker.
    """
    with socket.socket(fileno=int(sys.argv[1])) as line:
        found = serve(line)
    if found is not None:  # in a worker
        exec_worker(*found)


def serve(line: socket.socket) -> tuple[SpawnRequest, list[int]] | None:
    """Fork a worker for each order, and tell of the end of each.

    Returns:
        In a worker, its order and the descriptors that came along; in the starter None, once the
        supervisor is gone.
    """
    with (
        selectors.DefaultSelector() as selector,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        selector.register(line, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    send(
                        line,
                        {
                            "ended": key.data,
                            "code": os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]),
                        },
                    )
                elif (heard := receive(line)) is None:
                    return None
                elif (found := handle(*heard, line, selector)) is not None:
                    return found
    return None


def handle(
    message: dict[str, Any],
    descriptors: list[int],
    line: socket.socket,
    selector: selectors.BaseSelector,
) -> tuple[SpawnRequest, list[int]] | None:
    """Import what is asked for, and fork a worker if one is ordered; see `serve`."""
    import_modules(message["imports"])
    if "module" not in message:
        return None
    order = SpawnRequest(**message)
    if (pid := fork()) == 0:
        for worker in selector.get_map().values():
            if worker.data is not None:
                os.close(worker.fd)
        return order, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    handle = os.pidfd_open(pid)  # it is not waited for yet, and so the name of nobody else
    selector.register(handle, selectors.EVENT_READ, pid)
    send(line, {"started": pid}, handle)
    return None


def import_modules(modules: Sequence[str]) -> None:
    """Import what workers need."""
    for module in modules:
        with contextlib.suppress(
            Exception
        ):  # the worker imports it as well, and says what is wrong with it
            importlib.import_module(module)


def fork() -> int:
    """Fork; the worker leads a session of its own, and so a process group, before anybody hears of
    it.
    """
    # no collector looks at what is there: its memory stays shared, and collections are short
    gc.freeze()
    heard, told = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(heard)
        os.setsid()
        os.close(told)
        gc.enable()
        return pid
    os.close(told)
    os.read(heard, 1)
    os.close(heard)
    return pid


def exec_worker(order: SpawnRequest, descriptors: Sequence[int]) -> None:
    """Be the process that a shell would have started.

    Args:
        order: What to be.
        descriptors: Of the log, and of the socket where the order names one.
    """
    log, *sockets = descriptors
    for output in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, output)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setproctitle(
        " ".join([sys.executable, "-m", order.module, *order.arguments])
    )  # it writes over the environment that we were started with
    os.environ.clear()
    os.environ.update(order.environment)
    for descriptor in sockets:
        os.environ[order.socket_variable] = str(descriptor)
    sys.argv[1:] = order.arguments
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    main()
