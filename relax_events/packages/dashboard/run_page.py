"""Offers the page of a run as long as `relax run` works on it.

Only a socket is open at first. The server of the page, a process of its own with low priority,
starts when a browser connects; so a run without a reader of its page pays nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from relax_events.api.errors import ConfigError, EnvironmentProblem
from relax_events.api.http import SUPERVISOR_PID_VARIABLE
from relax_events.api.runs import RunConfig
from relax_events.packages.dashboard.access import PageAccess
from relax_events.packages.dashboard.server import build_url, open_port

log = structlog.get_logger()
PORT = 8321
SERVER = "relax_events.packages.dashboard.server"
MAX_FAILURES = 3
"""After so many servers that failed, the page is offered no longer."""
STOP_SECONDS = 5.0


class RunPage:
    """The page of a run, from its address to the end of its server; a context manager."""

    def __init__(self, listener: socket.socket, run_file: Path, log_path: Path) -> None:
        """Offer nothing yet.

        Args:
            listener: Listens on the loopback address.
            run_file: The resolved run file, which is there when a browser connects.
            log_path: Where the server's output goes.
        """
        self._listener, self._run_file, self._log_path = listener, run_file, log_path
        self.address = build_url(listener)
        self._wake, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._offer, name="run-page", daemon=True)

    @classmethod
    def open(cls, config: RunConfig, *, run_file: Path) -> RunPage | None:
        """Open the port: 8321, or a free one where it is taken. None where neither can be opened.

        The page reads with its owner's credentials, so a run whose broker asks for some offers
        none; `relax dashboard` does when it is asked.
        """
        if _asks_for_credentials(config):
            return None
        for port in (PORT, 0):
            try:
                listener = open_port(port)
            except EnvironmentProblem as error:
                log.debug("dashboard.not_offered", error=str(error))
            else:
                return cls(listener, run_file, config.run_directory / "logs" / "dashboard.log")
        return None

    def __enter__(self) -> Self:
        """Wait for browsers."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server, and close the port."""
        os.close(self._closing)
        self._thread.join(2 * STOP_SECONDS)
        self._listener.close()
        os.close(self._wake)

    def _offer(self) -> None:
        for _ in range(MAX_FAILURES):
            ready, _, _ = select.select([self._listener.fileno(), self._wake], [], [])
            if self._wake in ready or not self._serve():
                return
        log.warning("dashboard.start_failed", log=str(self._log_path))
        self._listener.close()

    def _serve(self) -> bool:
        """Run a server until it ends; return whether it ended by itself."""
        try:
            with self._log_path.open("ab") as output:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        SERVER,
                        str(self._run_file),
                        str(self._listener.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[self._listener.fileno()],
                    env=os.environ | {SUPERVISOR_PID_VARIABLE: str(os.getpid())},
                    start_new_session=True,  # Ctrl-C is for the run, which drains under the page
                )
        except OSError as error:
            log.warning("dashboard.start_failed", error=str(error))
            return True
        handle = os.pidfd_open(process.pid)
        try:
            ready, _, _ = select.select([handle, self._wake], [], [])
        finally:
            os.close(handle)
        if self._wake not in ready:
            process.wait()
            return True
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return False
        process.kill()
        process.wait()
        return False


def _asks_for_credentials(config: RunConfig) -> bool:
    broker = config.broker
    return (
        broker.credentials is not None
        or bool(broker.username)
        or broker.ca_file is not None
        or any(key.startswith(("security.", "sasl.", "ssl.")) for key in broker.client)
    )


@contextmanager
def offer_page(config: RunConfig, *, run_file: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Offer the page of a run during the block, where it may be offered.

    Args:
        config: The run.
        run_file: Its resolved run file.
        show: Called with a link that opens the page once.
    """
    page = RunPage.open(config, run_file=run_file)
    if page is None:
        yield
        return
    with page:
        try:
            access = PageAccess(config.run.directory)
            access.delete_old()
            show(access.create_link(page.address, run_id=config.run.id))
        except (ConfigError, OSError) as error:  # the run does without its page
            log.warning("dashboard.not_offered", error=str(error))
        yield
