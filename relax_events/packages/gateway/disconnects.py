"""Calls whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request

Result = TypeVar("Result")
CLIENT_CLOSED = 499


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
