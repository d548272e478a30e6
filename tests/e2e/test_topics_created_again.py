"""Topics of a run are deleted, or created again, between two of its sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Relax

from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
RUN_SECONDS = 200.0


def test_a_run_whose_topics_are_others_starts_nothing(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str
) -> None:
    broker = f"broker.bootstrap_servers={bootstrap_servers}"
    further = ("run", run_file, broker, "run.num_steps=5")
    first = relax("run", run_file, broker, timeout_seconds=RUN_SECONDS)
    assert first.code == 0, first.err
    admin = Admin(Connection(bootstrap_servers=bootstrap_servers, client_id="thief"))
    topics = sorted(admin.topics(f"relax.{run_id}."))
    for suffix, text in (
        ("advantage.samples", "is not the one that run"),
        ("control.commands", "does not describe run"),
    ):
        (topic,) = [name for name in topics if name.endswith(suffix)]
        admin.delete([topic])
        for _ in range(2):  # deleted, and then created again
            refused = relax(*further, timeout_seconds=RUN_SECONDS)
            assert refused.code == 2, (refused.out, refused.err)
            assert topic in refused.err
            assert text in refused.err
            assert "worker" not in refused.out
            applied = relax("topics", "apply", run_file, broker, "--yes")
            assert applied.code == 0, applied.err
    admin.close()
