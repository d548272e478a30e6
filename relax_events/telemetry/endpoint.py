"""Serves a worker's `/metrics`, `/healthz` and `/readyz`, and writes a run's metrics file.

The metrics file comes with the log offsets that it contains, where a restarted process continues.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from relax_events.config import TelemetryConfig
from relax_events.errors import EnvironmentProblem
from relax_events.http.server import TextHandler
from relax_events.telemetry.metrics import WorkerMetrics

Check = Callable[[], str]
"""Returns a problem; empty when there is none."""


class WorkerEndpoint:
    """An HTTP server in its own thread. `/healthz` reports liveness, `/readyz` readiness; both
    state the reason for a failure.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        metrics: WorkerMetrics,
        *,
        illness: Check,
        absence: Check,
        activity: Check = lambda: "",
    ) -> None:
        """Start serving.

        Args:
            config: Where to listen.
            metrics: The metrics that `/metrics` returns.
            illness: Returns why the process should be restarted.
            absence: Returns why the worker accepts no work.
            activity: Returns the long call that the work loop is currently in, which `/healthz`
                reports for a live process.
        Raises:
            EnvironmentProblem: The address is taken.
        """
        answers: dict[str, Callable[[], tuple[int, bytes]]] = {
            "/metrics": lambda: (200, metrics.render()),
            "/healthz": lambda: _verdict(illness(), activity()),
            "/readyz": lambda: _verdict(absence()),
        }

        class Handler(TextHandler):
            def do_GET(self) -> None:  # noqa: N802 as http.server calls it
                status, body = answers.get(
                    self.path.partition("?")[0],
                    lambda: (404, b"try /metrics, /healthz or /readyz\n"),
                )()
                self.respond(status, body, content_type="text/plain; version=0.0.4; charset=utf-8")

        try:
            self._server = ThreadingHTTPServer((config.metrics_host, config.metrics_port), Handler)
        except OSError as error:
            address = f"{config.metrics_host}:{config.metrics_port}"
            raise EnvironmentProblem(
                f"can't serve metrics on {address}: {error.strerror}; set telemetry.metrics_port"
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _verdict(problem: str, activity: str = "") -> tuple[int, bytes]:
    return (
        (503, f"no: {problem}\n".encode())
        if problem
        else (200, f"ok: {activity}\n".encode() if activity else b"ok\n")
    )


class MetricsFile:
    """A file of JSON lines, and `<name>.position.json` with the number of bytes that belong to the
    saved offsets.

    Lines that a killed process wrote after the last save are truncated and written again, so no
    line is duplicated or missing.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at the last saved position, or create it."""
        self._notes = path.with_name(f"{path.stem}.position.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = self._saved(path)
        self.positions: dict[str, int] = saved["positions"]
        """Offsets at which to continue, by topic; empty when nothing was saved, so that everything
        is read."""
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(saved["bytes"])
        self._file.seek(saved["bytes"])

    def _saved(self, path: Path) -> dict[str, Any]:
        try:
            saved: dict[str, Any] = orjson.loads(self._notes.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            saved = {"bytes": 0, "positions": {}}
        is_whole = path.exists() and path.stat().st_size >= saved["bytes"]
        return saved if is_whole else {"bytes": 0, "positions": {}}

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        self._file.write(orjson.dumps(line) + b"\n")

    def save(self, positions: Mapping[str, int]) -> None:
        """Record that the file contains all metrics before these offsets."""
        self.positions = dict(positions)
        newer = self._notes.with_suffix(".new")
        newer.write_bytes(orjson.dumps({"bytes": self._file.tell(), "positions": self.positions}))
        os.replace(newer, self._notes)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
