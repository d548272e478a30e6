"""Runs the API server in a thread next to the controller's loop."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import structlog

from relax_events.config import RunConfig, ScalingConfig
from relax_events.controller.api_endpoint import ApiEndpointFile
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.errors import EnvironmentProblem
from relax_events.http.guard import build_server_config
from relax_events.http.listener import build_url, find_missing_package, open_listener

log = structlog.get_logger()
CLOSE_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 5


def is_served(config: ScalingConfig) -> bool:
    """Return whether the controller serves the API.

    Raises:
        EnvironmentProblem: The API is wanted and a package that it needs is not installed.
    """
    missing = find_missing_package()
    if missing and config.api == "on":
        raise EnvironmentProblem(
            f"scaling.api = 'on' and {missing} is not installed; install relax-events[api]"
        )
    return config.api != "off" and not missing


def require_api_port(config: RunConfig) -> str:
    """Return the address of the API, once it belongs to this machine and its port is free.

    Raises:
        EnvironmentProblem: The address or the port can't be used; the text names the key to set.
    """
    if not is_served(config.scaling):
        return (
            "none: scaling.api = 'off'"
            if config.scaling.api == "off"
            else "none: relax-events[api] is not installed"
        )
    _listen(config.scaling).close()
    return (
        f"{config.scaling.host}, "
        f"{f'port {config.scaling.port}' if config.scaling.port else 'a free port'}"
    )


def _listen(config: ScalingConfig) -> socket.socket:
    remedies = "set scaling.port = 0 for a free one", "set scaling.host"
    return open_listener(config.host, config.port, remedies=remedies, what="the API")


class ApiServer:
    """Listens from the start; responds about a second later, once the web framework is loaded in
    its thread.
    """

    def __init__(
        self,
        config: RunConfig,
        service: ScalingService,
        put: Callable[[MainThreadTask[object]], None],
    ) -> None:
        """Listen.

        Raises:
            EnvironmentProblem: The port is taken, or the address is not this machine's.
            ConfigError: There is no token.
        """
        endpoint = ApiEndpointFile.from_config(config)
        self._endpoint, self._host = endpoint, config.scaling.host
        self._service, self._put, self._token = service, put, endpoint.open_token()
        self._listener = _listen(config.scaling)
        self._listener.listen()
        self.url = build_url(self._listener)
        endpoint.write_url(self.url)
        self._server: Any = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="api", daemon=True)
        self._thread.start()
        log.info("api.served", url=self.url)

    def _serve(self) -> None:
        import uvicorn

        from relax_events.controller.api import build_app

        app = build_app(self._service, self._put, token=self._token, host=self._host)
        settings = build_server_config(app, lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS)
        with self._lock:
            if self._is_closing:
                return
            self._server = uvicorn.Server(settings)
        self._server.run(sockets=[self._listener])

    def close(self) -> None:
        """Stop serving, and remove the address and the token."""
        self._endpoint.remove(self.url)
        with self._lock:
            self._is_closing = True
            server = self._server
        if server is not None:
            server.should_exit = True
            self._thread.join(CLOSE_SECONDS)
        self._listener.close()
