"""The fork server: imports the workers' modules, then forks one worker per spawn request. It has no
threads and computes nothing, so that it can be forked.

The supervisor starts it, and it exits with the supervisor. Its workers keep running.
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
    """Serve the supervisor on the descriptor in the command line until the supervisor exits; in a
    forked process, run the worker.
    """
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        worker_request = serve(channel)
    if worker_request is not None:  # in a worker
        exec_worker(*worker_request)


def serve(channel: socket.socket) -> tuple[SpawnRequest, list[int]] | None:
    """Fork a worker for each spawn request, and report each exit.

    Returns:
        In a worker, its request and the descriptors that came with it; in the fork server None,
            once
        the supervisor is gone.
    """
    with (
        selectors.DefaultSelector() as selector,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    send(
                        channel,
                        {
                            "ended": key.data,
                            "code": os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]),
                        },
                    )
                elif (message := receive(channel)) is None:
                    return None
                elif (worker_request := handle(*message, channel, selector)) is not None:
                    return worker_request
    return None


def handle(
    message: dict[str, Any],
    descriptors: list[int],
    channel: socket.socket,
    selector: selectors.BaseSelector,
) -> tuple[SpawnRequest, list[int]] | None:
    """Import the requested modules, and fork a worker if one is requested; see `serve`."""
    import_modules(message["imports"])
    if "module" not in message:
        return None
    request = SpawnRequest(**message)
    if (pid := fork()) == 0:
        for worker in selector.get_map().values():
            if worker.data is not None:
                os.close(worker.fd)
        return request, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    handle = os.pidfd_open(pid)  # not waited for yet, so the id can't be reused
    selector.register(handle, selectors.EVENT_READ, pid)
    send(channel, {"started": pid}, handle)
    return None


def import_modules(modules: Sequence[str]) -> None:
    """Import the workers' modules."""
    for module in modules:
        with contextlib.suppress(
            Exception
        ):  # the worker imports the module again and reports the error
            importlib.import_module(module)


def fork() -> int:
    """Fork a process that leads a session, and so a process group, before the supervisor learns of
    it.
    """
    # the garbage collector skips existing objects: their memory stays shared
    gc.freeze()
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read_end)
        os.setsid()
        os.close(write_end)
        gc.enable()
        return pid
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    return pid


def exec_worker(request: SpawnRequest, descriptors: Sequence[int]) -> None:
    """Become the worker process, as a shell would have started it.

    Args:
        request: The worker.
        descriptors: Of the log, and of the socket where the request names one.
    """
    log, *sockets = descriptors
    for output in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, output)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setproctitle(
        " ".join([sys.executable, "-m", request.module, *request.arguments])
    )  # overwrites the memory of the original environment
    os.environ.clear()
    os.environ.update(request.environment)
    for descriptor in sockets:
        os.environ[request.socket_variable] = str(descriptor)
    sys.argv[1:] = request.arguments
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    main()
