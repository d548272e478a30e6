"""What `make test` runs of the slow kinds: of everything that is claimed, one test that would fail without it. `make test-all` runs the rest too.

Unit, property and component tests are in the gate as a whole, except those marked long. Keep the sum of all under twelve minutes of test time on
a quiet core: two run side by side.
"""

from __future__ import annotations

GATE = (
    "engines/test_attached_servers.py",
    "engines/test_conformance.py",
    "engines/test_served_model.py",
    "integration/test_admin.py",
    "integration/test_broadcast.py",
    "integration/test_consumer_groups.py",
    "integration/test_control_following.py",
    "integration/test_dead_letters.py",
    "integration/test_embedded_broker.py",
    "integration/test_leases.py",
    "integration/test_map_role.py",
    "integration/test_ranks.py",
    "integration/test_step_commit.py",
    "integration/test_topic_tools.py",
    "integration/test_transactions.py",
    "e2e/test_bad_input.py",
    "e2e/test_quickstart.py",
    "e2e/test_replayed_runs.py::test_replay_is_its_source_bit_for_bit",
    "fault/test_killed_broker.py",
    "fault/test_killed_roles.py",
    "fault/test_killed_supervisor.py",
    "fault/test_large_things.py::test_oversize_record_is_refused_by_the_broker",
    "fault/test_paused_workers.py::test_trainer_is_fenced_when_a_second_one_takes_over",
    "fault/test_poison.py",
)
"""Files, or single tests, below `tests`."""
SGLANG_FIXTURES = {"sglang_python", "server_url", "make_sglang"}


def is_in_gate(name: str) -> bool:
    """Return whether a test is in the gate, by its name below `tests`, with or without its parameters."""
    plain = name.partition("[")[0]
    return any(plain == chosen or plain.startswith(f"{chosen}::") for chosen in GATE)
