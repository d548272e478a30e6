"""Calls of `relax scale` in a run under test, and their records on the control log."""

from __future__ import annotations

import subprocess
from typing import Any

import orjson
from harness import FaultRun, command, environment

from relax_events.projections.scale_requests import Status
from relax_events.projections.scaling import ScaleState

API = {"scaling": {"api": "on"}}


def scale(run: FaultRun, *words: str) -> tuple[int, dict[str, Any]]:
    """Call `relax scale` as a shell does, with nothing but the run file."""
    run.wait_until(lambda: bool(run.logged("controller-0", "api.served")), "the API is served")
    line = command("scale", run.run_file, *words, "--output", "json")
    ended = subprocess.run(
        line, cwd=run.folder, env=environment(), capture_output=True, timeout=200, check=False
    )
    print(ended.stderr.decode())
    return ended.returncode, orjson.loads(ended.stdout or b"{}")


def state_of(run: FaultRun) -> ScaleState:
    """Fold the control log, as every reader does."""
    state = ScaleState()
    for record in run.records("control.commands"):
        state.apply(run.decode(record))
    return state


def wait_until_over(run: FaultRun, request_id: str) -> Status:
    """Wait until a request is over, and return how it ended."""
    run.wait_until(lambda: not state_of(run).requests[request_id].is_open, f"{request_id} is over")
    return state_of(run).requests[request_id].status


def statuses(run: FaultRun, request_id: str) -> list[str]:
    """Return the statuses of a request, as the log has them."""
    events = [run.decode(record) for record in run.records("control.commands")]
    given = [
        event.arguments
        for event in events
        if getattr(event, "arguments", {}).get("request") == request_id
    ]
    return [arguments["status"] for arguments in given if "status" in arguments]
