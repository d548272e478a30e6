"""An SGLang plugin for servers that tests start: while the gate's file exists, a server takes a few
steps a second.

The file holds how many tokens a sample may have before its steps are slow. Prompts are prefilled at
full speed, and a step is never delayed for long, so that the server can still abort samples, sleep
or load weights.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_GATE_FILE"
STEP_SECONDS = 0.25
"""Of a step while the gate is shut: 400 tokens take 100 s, which is time enough to look."""
LOOK_SECONDS = 0.01
ENTRY_POINTS = "[sglang.srt.plugins]\ngate = sglang_gate:stand_before_steps\n"


def gated_interpreter(python: str, folder: Path, file: Path) -> str:
    """Write a program that runs an interpreter whose SGLang finds this plugin.

    Args:
        python: The interpreter that has SGLang.
        folder: For the program, and for what reports SGLang of the plugin.
        file: The gate's.

    Returns:
        The program's path.
    """
    (folder / "sglang_gate.py").symlink_to(__file__)
    metadata = folder / "sglang_gate-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-gate\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}" {VARIABLE}="{file}" '
        f'exec "{python}" "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def stand_before_steps() -> None:
    """Wait before each step of a scheduler. (Entry point in `sglang.srt.plugins`.)"""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_batch", _slow_down, HookType.BEFORE
    )


def _slow_down(_: Any, batch: Any, *__: Any, **___: Any) -> None:
    file, end = Path(os.environ[VARIABLE]), time.monotonic() + STEP_SECONDS
    try:
        num_tokens = int(file.read_text())
    except FileNotFoundError:
        return
    if max(len(request.output_ids) for request in batch.reqs) >= num_tokens:
        while file.exists() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
