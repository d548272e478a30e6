"""A whole run on a bucket where each role has its own credential, and the least rights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from command_line import Relax, report_of

from relax_events.config import load_run_config
from relax_events.objects.rights import CHECKPOINTS, MARKER, SAMPLES, STORE_RIGHTS, WEIGHTS
from relax_events.ops.store_policies import build_store_policies
from tests.s3_server import S3Server, environment

pytestmark = pytest.mark.timeout(300)
RUN_SECONDS = 200.0


def test_run_needs_no_more_than_the_rights_of_its_roles(
    relax: Relax, run_file: Path, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        "objects.uri=s3://bucket/runs",
        "objects.claim_check_threshold_bytes=16",
        "trainer.checkpoint_every=1",
    ]
    server = S3Server()
    server.policies = build_store_policies(load_run_config(run_file, overrides))
    settings = environment("127.0.0.1", server.server_port)
    (tmp_path / "credentials").mkdir()
    for principal in STORE_RIGHTS:
        given = settings | {"AWS_ACCESS_KEY_ID": principal}
        lines = "".join(f"{name}={value}\n" for name, value in given.items())
        (tmp_path / "credentials" / f"{principal}.env").write_text(lines)
    monkeypatch.setenv("OBJECTS_CREDENTIALS", str(tmp_path / "credentials"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        ended = relax("run", run_file, *overrides, timeout_seconds=RUN_SECONDS)
    finally:
        server.closing.set()
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()
    assert ended.code == 0, ended.err
    assert report_of(tmp_path, run_id)["steps"] == 3
    folders = {key.split("/")[4] + "/" for key in server.objects if MARKER not in key}
    assert {WEIGHTS, CHECKPOINTS, SAMPLES} <= folders
    refused = [call for call in server.refused if MARKER not in call]
    assert refused == [], "a role does what its rights don't allow"
