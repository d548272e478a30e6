"""Calls of `relax scale` in a run under test, and their records on the control log."""

from __future__ import annotations

import subprocess
from typing import Any

import orjson
from harness import FaultRun, command, environment

from relax_events.events.parts import now_micros
from relax_events.events.types import RunCommanded
from relax_events.projections.scale_requests import ScaleRequest, Status
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

    def is_over() -> bool:
        return not state_of(run).requests[request_id].is_open(now=now_micros())

    run.wait_until(is_over, f"{request_id} is over")
    state = state_of(run)
    return state.status(state.requests[request_id], now=now_micros())


def outcomes(run: FaultRun, request_id: str) -> list[str]:
    """Return the outcome of a request, as often as the log has it."""
    events = [run.decode(record) for record in run.records("control.commands")]
    records = [
        ScaleRequest.from_record(event) for event in events if isinstance(event, RunCommanded)
    ]
    return [
        str(record.outcome)
        for record in records
        if record is not None and record.request_id == request_id and record.outcome
    ]
