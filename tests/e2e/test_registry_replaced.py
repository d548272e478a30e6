"""The schema registry of a run is lost, and another one, with other ids, stands at its address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Relax, report_of
from registry_server import Registry, serve_registry

from relax_events.events.codec import EventCodec
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader

RUN_SECONDS = 200.0


def register_foreign_schemas(registry: Registry) -> None:
    """Give the first ids of a registry to others."""
    for number in range(3):
        foreign = json.dumps({"type": "record", "name": f"Foreign{number}", "fields": []})
        status, _ = registry.answer(
            "POST", f"/subjects/foreign-{number}/versions", {"schema": foreign}
        )
        assert status == 200


@pytest.mark.long
@pytest.mark.timeout(480)
def test_run_continues_its_history_when_its_registry_was_replaced(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    broker = f"broker.bootstrap_servers={bootstrap_servers}"
    with serve_registry() as first:
        ended = relax(
            "run",
            run_file,
            broker,
            f"broker.schema_registry={first.url}",
            timeout_seconds=RUN_SECONDS,
        )
        assert ended.code == 0, ended.err
    with serve_registry() as replaced:
        register_foreign_schemas(replaced)
        resumed = relax(
            "run",
            run_file,
            broker,
            f"broker.schema_registry={replaced.url}",
            "run.num_steps=5",
            "--accept-changes",
            timeout_seconds=RUN_SECONDS,
        )
        assert resumed.code == 0, resumed.err
        assert not any(call.startswith("POST /subjects/relax") for call in replaced.calls)
    assert report_of(tmp_path, run_id)["outcomes"]["trained"] == 5 * 4
    checked = relax("ledger", "check", run_file, broker, "--output", "json")
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["records_unreadable"] == 0
    codec = EventCodec()
    reader = LogReader(Connection(bootstrap_servers, client_id="test"))
    for record in reader.read_to_end([(f"relax.{run_id}.control.schemas", 0)]):
        codec.learn(record.value)
    versions = [
        getattr(codec.decode(record.value), "policy_version", None)
        for record in reader.read_to_end([(f"relax.{run_id}.control.policy-versions", 0)])
    ]
    reader.close()
    assert versions == [0, 1, 2, 3, 4, 5]
