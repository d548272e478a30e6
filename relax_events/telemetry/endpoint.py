"""Serves a worker's `/metrics`, `/healthz` and `/readyz`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer

from relax_events.config import TelemetryConfig
from relax_events.errors import EnvironmentProblem
from relax_events.http.responses import TextHandler
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
