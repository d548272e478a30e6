"""A run on a saved checkpoint whose run file leaves out what can be derived: the log, the doctor
and a second session have the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from command_line import Relax, log_of

from relax_events.config import load_run_config
from relax_events.config.unset_keys import missing_keys

pytestmark = pytest.mark.timeout(900)
RUN_SECONDS = 300
EXPECTED = {
    "trainer.learning_rate": 1e-6,
    "model.dtype": "float32",
    "engine.max_context_tokens": 4096,
    "workers.drain_seconds": 20.0,
    "run.weight_update_mode": "recompute",
    "run.retain_versions": 0,
    "trainer.max_tokens_per_micro_batch": 8192,
}
"""Of a tiny model of 4096 positions that is there already, on any machine of 8 GB or more."""


def test_second_session_keeps_the_settings_derived_in_the_first(
    prepared: Path, run_id: str, relax: Relax, tmp_path: Path
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(f"""
[run]
id = "{run_id}"
num_steps = 1
prompts_per_step = 2
samples_per_prompt = 2

[model]
path = "{prepared / "model"}"

[data]
source = "jsonl:{prepared / "prompts.jsonl"}"

[engine]
max_running_samples = 8
sampling = {{ max_new_tokens = 6 }}

[reward]
function = "{prepared / "reward.py"}:spread"

[workers]
heartbeat_seconds = 0.2

[scaling]
api = "off"
""")
    given = load_run_config(run_file, environment={})
    missing = missing_keys(given)
    reported = relax("doctor", run_file)
    for key, value in EXPECTED.items():
        assert f"{key} {value}".split() in [
            line.split()[:2] for line in reported.out.splitlines()
        ], reported.out
    first = relax("run", run_file, timeout_seconds=RUN_SECONDS)
    assert first.code == 0, first.err
    began = session_of(tmp_path, run_id, missing)
    assert {key: began[key] for key in EXPECTED} == EXPECTED
    logged = {
        event["key"]: event["value"]
        for event in log_of(tmp_path, run_id, "run")
        if event["event"] == "default.derived"
    }
    assert logged == began
    # the machine is another one now, as far as the run file of the first session says: what it
    # began with stays
    resolved = tmp_path / ".relax/runs" / run_id / "run.json"
    resolved.unlink()
    again = relax("run", run_file, "run.num_steps=2", timeout_seconds=RUN_SECONDS)
    assert again.code == 0, again.err
    changed = [line.strip() for line in again.err.splitlines() if "->" in line and "  (" in line]
    assert [line.partition(":")[0] for line in changed] == ["run.num_steps"], again.err
    assert session_of(tmp_path, run_id, missing) == began
    assert f"run {run_id} started with it" in relax("doctor", run_file).out


def session_of(folder: Path, run_id: str, keys: list[str]) -> dict[str, Any]:
    tree = orjson.loads((folder / ".relax/runs" / run_id / "run.json").read_bytes())
    return {key: _at(tree, key) for key in keys}


def _at(tree: dict[str, Any], key: str) -> Any:
    found: Any = tree
    for name in key.split("."):
        found = found[name]
    return found
