"""A run whose model and data are named on a hub: from an empty cache to its end, and resumed on
a host with an empty cache of its own, after the hub's branches have moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Relax, run_file_text
from hub_server import serve_hub

pytestmark = pytest.mark.timeout(600)
RUN_SECONDS = 250.0


@pytest.mark.long
def test_run_by_name_is_resumed_from_its_commit_on_another_host(
    relax: Relax,
    prepared: Path,
    bootstrap_servers: str,
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = run_file_text(prepared, run_id, num_steps=2)
    run_file = tmp_path / "run.toml"
    text = text.replace(f'"{prepared / "model"}"', '"hf:org/tiny"')
    run_file.write_text(text.replace(f"jsonl:{prepared / 'prompts.jsonl'}", "hf:org/rows:train"))
    broker = f"broker.bootstrap_servers={bootstrap_servers}"
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "first"))
        commit = hub.add_folder("org/tiny", prepared / "model")
        name = f"hf:org/tiny@{commit}"
        data = hub.add("org/rows", kind="datasets")
        rows = data.commit({"train.jsonl": (prepared / "prompts.jsonl").read_bytes()})

        unprepared = relax("doctor", run_file)
        assert "fetch it: relax models prepare RUN_FILE model.path=hf:org/tiny" in unprepared.out
        planned = relax("plan", run_file)
        assert planned.code == 0, planned.err
        assert not [call for call in hub.calls if call.endswith(".safetensors")]

        first = relax("run", run_file, broker, timeout_seconds=RUN_SECONDS)
        assert first.code == 0, first.err
        assert f"fetching model.path {name}" in first.err
        assert f"fetching data.source hf:org/rows@{rows}:train" in first.err

        repo = hub.repos["models/org/tiny"]
        repo.commit(repo.commits[commit] | {"README.md": b"moved"})
        data.commit({"train.jsonl": b'{"prompt": "a", "answer": "b"}'})
        (tmp_path / ".relax/runs" / run_id / "run.json").unlink()
        monkeypatch.setenv("HF_HOME", str(tmp_path / "second"))
        resumed = relax("run", run_file, broker, "run.num_steps=3", timeout_seconds=RUN_SECONDS)
        assert resumed.code == 0, resumed.err
        changes = resumed.err.partition("changed in the run file")[2]
        assert "run.num_steps" in changes
        assert "hf:" not in changes.partition("run.num_steps")[0]

        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        hub.calls.clear()
        third = relax("run", run_file, broker, "run.num_steps=4", timeout_seconds=RUN_SECONDS)
        assert third.code == 0, third.err
        assert hub.calls == []
    cache = tmp_path / "second/hub/models--org--tiny"
    assert (cache / "snapshots" / commit / "model.safetensors").is_file()
