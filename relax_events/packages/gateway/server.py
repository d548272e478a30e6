"""The gateway's thread: an event loop with the HTTP server and the episodes."""

from __future__ import annotations

import asyncio
import gc

import uvicorn

from relax_events.api.drivers import LoopThread
from relax_events.api.http import TlsFiles, build_server_config, build_url, open_listener
from relax_events.packages.gateway.app import build_gateway
from relax_events.packages.gateway.offers import SessionOffers
from relax_events.packages.gateway.session_keys import SessionKeys

HOST = "127.0.0.1"
MAX_CONNECTIONS = 4096
"""Each program keeps one or a few."""
DRAIN_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Of an idle connection: longer than most tools take."""


class GatewayServer:
    """Serves the gateway: on a free port of this machine, or where harnesses find it.

    Attributes:
        url: The server's address.
        loop: Runs the server and the episodes.
    """

    def __init__(
        self,
        keys: SessionKeys,
        *,
        model_name: str,
        host: str = HOST,
        port: int = 0,
        token: str = "",
        offers: SessionOffers | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Start the thread, and wait until it answers.

        Args:
            keys: The open sessions.
            model_name: The name under which the policy is listed.
            host: Address to listen on.
            port: 0 takes a free one.
            token: Which a harness must have to take a session.
            offers: The episodes of harnesses that people start, if they drive the policy.
            tls: The certificate and its key; None speaks plain HTTP.
        Raises:
            EnvironmentProblem: No port is free.
        """
        remedies = "free it, or set environment.harness.port", "set environment.harness.host"
        self._listener = open_listener(host, port, remedies=remedies, what="the gateway")
        self._listener.listen(MAX_CONNECTIONS)
        self.url = build_url(self._listener, tls=tls)
        config = build_server_config(
            build_gateway(keys, model_name=model_name, host=host, token=token, offers=offers),
            max_connections=MAX_CONNECTIONS,
            tls=tls,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self.loop = LoopThread("gateway")
        self._serving = self.loop.run(self._start()).result()
        # A full collection over modules and models stops all sessions for 0.16 s: what lives as
        # long as the process is left out from now on.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Cancel what runs, and stop the server."""
        self.loop.close(last=self._stop())
        self._listener.close()

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def _stop(self) -> None:
        self._server.should_exit = True
        await self._serving
