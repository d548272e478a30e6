"""HTTP responses: server-sent events, and cancellation if the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import HTTPException, Request

from relax_events.errors import RelaxError

Result = TypeVar("Result")
CLIENT_CLOSED = 499
END = b"data: [DONE]\n\n"


async def event_stream(events: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield server-sent events; an error is the last one.

    Args:
        events: JSON texts.
    """
    try:
        async for event in events:
            yield b"data: " + event + b"\n\n"
    except RelaxError as error:
        yield (
            b"data: "
            + orjson.dumps({"error": {"message": str(error), "type": type(error).__name__}})
            + b"\n\n"
        )
    yield END


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run work for a client, and cancel it if the client disconnects.

    Raises:
        HTTPException: The client has disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work_task, disconnect_task = (
        asyncio.create_task(work),
        asyncio.create_task(wait_for_disconnect()),
    )
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise HTTPException(CLIENT_CLOSED, "the client has disconnected")
        return work_task.result()
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)
