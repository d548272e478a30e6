"""Runs the controller's API server in a thread next to its loop, and publishes the API's address
and token in two files of the run's folder that only their owner may read.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from relax_events.config import RunConfig, ScalingConfig
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.errors import CheckFailed, ConfigError, EnvironmentProblem
from relax_events.http.server import (
    build_server_config,
    build_url,
    find_missing_package,
    open_listener,
)
from relax_events.http.tls import choose_run_tls
from relax_events.secret_handling import hide, read_secret, write_private

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class ApiEndpointFile:
    """The files of a run's API."""

    address_file: Path
    token_file: Path
    is_own_token: bool

    @classmethod
    def from_config(cls, config: RunConfig) -> ApiEndpointFile:
        """Return the paths of the files."""
        folder, token_file = config.run_directory, config.scaling.token_file
        return cls(folder / "api.json", token_file or folder / "api-token", token_file is None)

    def open_token(self) -> str:
        """Return the token that calls must carry; create the run's own token where it is missing.

        Raises:
            ConfigError: The file that `scaling.token_file` names is missing or empty.
        """
        if self.is_own_token and not self.token_file.exists():
            write_private(self.token_file, secrets.token_urlsafe(TOKEN_BYTES).encode())
        return self.read_token()

    def read_token(self) -> str:
        """Return the token; raises as `open_token`, and also where the run has created none."""
        if self.is_own_token and not self.token_file.exists():
            raise ConfigError(
                f"{self.token_file} does not exist: the run has not served its API here; "
                "start it, or name the file of its token"
            )
        token = read_secret(self.token_file, key="scaling.token_file")
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"scaling.token_file: {self.token_file} must hold one word of ASCII")
        hide(token)
        return token

    def write_url(self, url: str) -> None:
        """Write the address of the API."""
        write_private(self.address_file, orjson.dumps({"url": url}))

    def remove(self, url: str) -> None:
        """Remove the address and the run's own token, unless another controller has written its own
        address since.
        """
        with suppress(CheckFailed):
            if self.read_url() == url:
                self.address_file.unlink(missing_ok=True)
                if self.is_own_token:
                    self.token_file.unlink(missing_ok=True)

    def read_url(self) -> str:
        """Return the address of the API.

        Raises:
            CheckFailed: No address was written here.
        """
        try:
            return str(orjson.loads(self.address_file.read_bytes())["url"])
        except FileNotFoundError:
            raise CheckFailed(
                f"{self.address_file} does not exist: the run has served no API here; start the "
                "run, or give --url and --token-file of one elsewhere (extra `api`, scaling.api)"
            ) from None


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
        ConfigError: The address needs encryption.
    """
    if not is_served(config.scaling):
        return (
            "none: scaling.api = 'off'"
            if config.scaling.api == "off"
            else "none: relax-events[api] is not installed"
        )
    tls = choose_run_tls(config.http, config.scaling.host)
    _listen(config.scaling).close()
    return (
        f"{'HTTP' if tls is None else 'HTTPS'}, {config.scaling.host}, "
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
            ConfigError: There is no token, or the address needs encryption.
        """
        self._tls = choose_run_tls(config.http, config.scaling.host)
        endpoint = ApiEndpointFile.from_config(config)
        self._endpoint, self._host = endpoint, config.scaling.host
        self._service, self._put, self._token = service, put, endpoint.open_token()
        self._listener = _listen(config.scaling)
        self._listener.listen()
        self.url = build_url(self._listener, tls=self._tls)
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
        settings = build_server_config(
            app, tls=self._tls, lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS
        )
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
