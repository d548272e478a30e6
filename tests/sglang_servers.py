"""Waits for SGLang servers that a test starts."""

from __future__ import annotations

import time

import httpx2

from relax_events.engines.sglang.process import ServerProcess

START_SECONDS = 600.0


def await_ready(process: ServerProcess) -> None:
    """Wait until a server takes requests."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (ending := process.ending()) is not None:
            raise AssertionError(ending)
        try:
            if httpx2.get(f"{process.url}/ready", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            pass
    raise AssertionError(f"not ready within {START_SECONDS:g} s: {process.log_tail()}")
