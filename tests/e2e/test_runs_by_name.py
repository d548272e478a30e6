"""A run whose model and data are named on a hub: from an empty cache to its end, then resumed and
replayed on hosts with empty caches of their own, after the hub's branches have moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Relax, run_file_text
from hub_server import serve_hub

pytestmark = pytest.mark.timeout(600)
RUN_SECONDS = 250.0


@pytest.mark.long
def test_run_by_name_keeps_its_commit_on_other_hosts(
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

        monkeypatch.setenv("HF_HOME", str(tmp_path / "third"))
        alone = relax("worker", "rollout", run_file, broker)
        assert alone.code == 2
        remedy = f"relax models prepare RUN_FILE model.path={name}"
        assert f"{name} is not in this host's cache of the hub; fetch it: {remedy}" in alone.err
        assert relax("models", "prepare", run_file, f"model.path={name}").code == 0

        monkeypatch.setenv("HF_HOME", str(tmp_path / "fourth"))
        servers = ("--bootstrap-servers", bootstrap_servers)
        replayed = relax(
            *("runs", "replay", run_id, f"{run_id}-again", *servers, "--verify", "--trust-source"),
            timeout_seconds=RUN_SECONDS,
        )
        assert replayed.code == 0, replayed.err
    for host in ("second", "third", "fourth"):
        snapshots = tmp_path / host / "hub/models--org--tiny/snapshots"
        assert (snapshots / commit / "model.safetensors").is_file()
