"""A whole run on a secured broker: every process as its own principal, and no password left
anywhere."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from command_line import Relax, report_of

pytestmark = pytest.mark.timeout(300)
RUN_SECONDS = 200.0


def test_secured_run_completes_and_leaves_no_password_behind(
    relax: Relax, run_file: Path, tmp_path: Path, run_id: str
) -> None:
    made = relax("broker", "secure", run_file, "--out", "security")
    assert made.code == 0, made.err
    ended = relax("run", run_file, "broker.credentials=security", timeout_seconds=RUN_SECONDS)
    assert ended.code == 0, ended.err
    assert report_of(tmp_path, run_id)["steps"] == 3
    looked = relax("doctor", run_file, "broker.credentials=security")
    secrets = [file.read_bytes() for file in (tmp_path / "security/secrets").iterdir()]
    assert len(secrets) > 9
    printed = {"secure": made, "run": ended, "doctor": looked}
    left = {
        str(file): file.read_bytes() for file in (tmp_path / ".relax").rglob("*") if file.is_file()
    }
    left |= {name: f"{command.out}{command.err}".encode() for name, command in printed.items()}
    assert [
        name for name, content in left.items() if any(secret in content for secret in secrets)
    ] == []
    given = orjson.loads((tmp_path / ".relax/runs" / run_id / "run.json").read_bytes())["broker"]
    assert (given["credentials"], given["username"], given["password_file"]) == (None, "", None)


@pytest.mark.long
def test_replay_of_a_secured_run_uses_its_own_principals(
    relax: Relax, run_file: Path, tmp_path: Path, run_id: str
) -> None:
    again = f"{run_id}-again"
    run_file.write_text(run_file.read_text() + '\n[broker]\ncredentials = "security"\n')
    assert relax("broker", "secure", run_file, "--out", "security").code == 0
    ended = relax("run", run_file, timeout_seconds=RUN_SECONDS)
    assert ended.code == 0, ended.err
    words = ("runs", "replay", run_id, again, "--verify", "--config", run_file)
    refused = relax(*words)
    assert (refused.code, f"no principal 'relax.{again}.operator'" in refused.err) == (2, True), (
        refused.err
    )
    made = relax(
        "broker", "secure", tmp_path / ".relax/runs" / again / "run-file.json", "--out", "security"
    )
    assert made.code == 0, made.err
    replayed = relax(*words, timeout_seconds=RUN_SECONDS)
    assert (replayed.code, "bit for bit" in replayed.out) == (0, True), replayed
