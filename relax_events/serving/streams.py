"""Answers over HTTP: events as they come, and an end to what nobody waits for."""

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
    """Write server-sent events; an error is the last of them.

    Args:
        events: JSON.
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


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do work for a caller, and give it up when the caller hangs up.

    Raises:
        HTTPException: The caller is gone.
    """

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, waiting = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HTTPException(CLIENT_CLOSED, "the caller has hung up")
        return doing.result()
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)
