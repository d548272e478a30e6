"""Time and memory of a role's start do not grow with the run: control log and queue of a long run
on the real broker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_events.config import RunConfig
from tests.integration.long_log import STARTS, LongLog

ROOT = Path(__file__).parents[2]
SHORT, LONG, GROUPS = 130, 290, 4
NUM_STEPS = 20_000
START_SECONDS = 120


def started(config: RunConfig, folder: Path, *roles: str) -> dict[str, dict[str, Any]]:
    """Start roles in their own process, and return its output for each."""
    path = folder / "run.json"
    path.write_text(config.model_dump_json())
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [
        sys.executable,
        str(ROOT / "tests" / "integration" / "long_log.py"),
        *roles,
        str(path),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"role": ')]
    return {line["role"]: line for line in lines}


def long_run(
    apply_run: Callable[..., RunConfig],
    folder: Path,
    *,
    run_id: str,
    groups: int,
    samples: int,
    every: int,
) -> RunConfig:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}", "answer": ""}}\n' for number in range(64)))
    run = {
        "id": run_id,
        "prompts_per_step": groups,
        "samples_per_prompt": samples,
        "num_steps": 10**6,
        "max_staleness": 1,
    }
    return apply_run(
        run=run,
        data={"source": f"jsonl:{rows}"},
        trainer={"checkpoint_every": every},
        telemetry={"trackers": []},
    )


def test_startup_reads_and_memory_do_not_grow_with_the_number_of_steps(
    apply_run: Callable[..., RunConfig], run_id: str, tmp_path: Path
) -> None:
    """Both runs have the same distance to their last checkpoint; the longer one has more than
    twice as many steps, outcomes, prompts and reports."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for num_steps in (SHORT, LONG):
        config = long_run(
            apply_run, tmp_path, run_id=f"{run_id}-{num_steps}", groups=GROUPS, samples=2, every=20
        )
        LongLog(config, num_steps=num_steps, reports=20).write()
        found[num_steps] = {role: started(config, tmp_path, role)[role] for role in STARTS}
    for num_steps, roles in found.items():
        assert (roles["trainer"]["num_steps"], roles["trainer"]["trained"]) == (
            num_steps,
            num_steps * GROUPS,
        )
        assert (roles["controller"]["num_steps"], roles["controller"]["trained"]) == (
            num_steps,
            num_steps * GROUPS,
        )
        assert (roles["prompter"]["next_step"], roles["prompter"]["next_row"]) == (
            num_steps + 2,
            (num_steps + 2) * GROUPS,
        )
        assert roles["prompter"]["in_flight"] == 2 * GROUPS
        assert roles["follower"]["policy_version"] == num_steps
        assert roles["trainer"]["steps_held"] <= 3 * 20
        assert roles["metrics"]["lines"] == 500 + min(num_steps, 500)
    for role in ("trainer", "prompter", "follower"):
        few, many = found[SHORT][role]["decoded"], found[LONG][role]["decoded"]
        assert many <= few + 128, (
            f"{role} decoded {few} records after {SHORT} steps and {many} after {LONG}"
        )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_run_of_many_steps_starts_again_quickly(
    apply_run: Callable[..., RunConfig], run_id: str, tmp_path: Path
) -> None:
    """Prints what each start takes behind 20,000 steps of 64 prompt groups of 8 samples; only
    counts are held, since machines differ."""
    config = long_run(apply_run, tmp_path, run_id=run_id, groups=64, samples=8, every=50)
    log = LongLog(config, num_steps=int(os.environ.get("LONG_RUN_STEPS", NUM_STEPS)), reports=2)
    log.write()
    print({entity: f"{size >> 20} MiB" for entity, size in log.bytes.items()}, flush=True)
    for role in STARTS:
        found = started(config, tmp_path, role)[role]
        print(found, flush=True)
        assert found["decoded"] < 30_000, f"{role} decoded {found['decoded']} records"
