"""The broker is killed, together with all workers and alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from broker_steps import MEMBER, next_line, other_process
from harness import BROKER_SECONDS, EVERYTHING_SECONDS, FaultRun, assert_ledger_balances
from node import Node, choose_ports

from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.workarounds import dead_members
from relax_events.kafka.workarounds.dead_members import evict_predecessors
from relax_events.topics import TopicSpec


def test_run_finishes_when_broker_and_workers_are_killed(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 60})
    process = run.start()
    run.wait_until_steps(5)
    killed = run.kill(*run.worker_ids)
    run.broker.kill()
    run.recovers_within(EVERYTHING_SECONDS)
    run.wait_until_ready_again(*run.worker_ids, killed=killed)

    run.broker.kill()
    run.wait_until(lambda: run.broker.is_running, "the broker starts again")
    pid = run.broker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.recovers_within(BROKER_SECONDS)
    output = run.output.read_text()
    assert "the broker died and is restarted in 1 s: the embedded broker in" in output
    assert "was killed (SIGKILL)" in output
    assert run.state.num_steps < run.config.run.num_steps, (
        "the broker was killed within the run, not after it"
    )

    assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)


def test_index_of_a_killed_worker_is_free_although_the_broker_died_too(
    directory: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dead_members, "EVICTION_SECONDS", 300.0
    )  # a busy machine takes long to start a broker
    port, controller_port = choose_ports(2)
    topic, group, name = f"{run_id}.samples", f"{run_id}.reward", f"{run_id}.reward-0"
    with Node(
        directory / f"{run_id}-node", port=port, controller_port=controller_port, properties={}
    ) as node:
        connection = Connection(node.bootstrap_servers, client_id=name)
        Admin(connection).create([TopicSpec(topic, 4, 1, "of a test", {})])
        with other_process(MEMBER, node.bootstrap_servers, name, group, topic) as member:
            assert next_line(member) == "assigned"
            node.kill()
            member.kill()
            member.wait(60)
        node.spawn()
        assert evict_predecessors(connection, group) == 1, (
            "it waited for the broker, and for the group to be read"
        )
        assert evict_predecessors(connection, group) == 0
