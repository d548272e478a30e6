"""An HTTP client for MCP servers whose responses are bounded before they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2

from relax_events.environments.interfaces.server_bounds import ServerBounds

PLAIN = ("", "identity")


def open_bounded_client(bounds: ServerBounds) -> httpx2.AsyncClient:
    """Return a client that refuses packed and larger responses.

    An event stream that the server keeps open (the response to a GET) has no bound in all; each of
    its events has one.
    """

    async def bound(response: Any) -> None:
        if response.headers.get("content-encoding", "").lower() not in PLAIN:
            raise httpx2.DecodingError(
                "the server packed its response, which is refused: it may unpack to any size",
                request=response.request,
            )
        if response.request.method != "GET":
            response.stream = _BoundedStream(response.stream, bounds)

    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(bounds.open_seconds, read=max(bounds.request_seconds, 300.0)),
        event_hooks={"response": [bound]},
    )


class _BoundedStream(httpx2.AsyncByteStream):
    """The bytes of a response up to a bound."""

    def __init__(self, stream: Any, bounds: ServerBounds) -> None:
        self._stream, self._bounds = stream, bounds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._bounds.max_message_bytes
        async for part in self._stream:
            left -= len(part)
            if left < 0:
                raise httpx2.ReadError(f"the server sent more than {self._bounds.describe()}")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
