"""One of three brokers dies, or is cut off from the other two, while it leads the control topics:
the others take over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import BROKER_SECONDS, EVERYTHING_SECONDS, FaultRun, assert_ledger_balances


@pytest.fixture
def broker(directory: Path, run_id: str) -> Iterator[Cluster]:
    """Yield three brokers that only the test starts and kills."""
    with Cluster(directory / f"{run_id}-cluster") as cluster:
        yield cluster


@pytest.mark.long
def test_run_continues_when_the_leader_crashes_and_a_broker_is_lost_for_good(
    start_run: Callable[..., FaultRun], broker: Cluster
) -> None:
    run = start_run(
        run={"num_steps": 120},
        broker={"bootstrap_servers": broker.bootstrap_servers, "replication_factor": 3},
    )
    topic = run.plan.topic("control.train-steps")
    run.start()
    run.wait_until_steps(3)
    first = broker.leader(topic)
    broker.nodes[first].kill()
    seconds = run.recovers_within(BROKER_SECONDS)
    broker.nodes[first].start()
    back = run.recovers_within(BROKER_SECONDS)
    run.wait_until(
        lambda: broker.is_whole(""),
        "the node that came back has caught up",
        timeout_seconds=BROKER_SECONDS,
    )

    second = broker.leader(topic)
    assert second != first, "another node leads meanwhile"
    broker.nodes[second].kill()
    lost = run.recovers_within(BROKER_SECONDS)
    assert run.state.num_steps < run.config.run.num_steps, (
        "all this was done within the run, not after it"
    )
    print(f"seconds: leader killed {seconds:.1f}, back {back:.1f}, another lost {lost:.1f}")

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    assert broker.nodes[second].pid is None, "one was lost for good"


@pytest.mark.long
@pytest.mark.parametrize("entity", ["control.train-steps", "prompt.groups"])
def test_run_continues_when_the_leader_is_partitioned_from_other_brokers(
    start_run: Callable[..., FaultRun], broker: Cluster, entity: str
) -> None:
    """Every client still reaches it, and it still believes that it leads: records that it accepts
    must not count, and no client may wait for it long."""
    run = start_run(
        run={"num_steps": 120},
        broker={"bootstrap_servers": broker.bootstrap_servers, "replication_factor": 3},
    )
    topic = run.plan.topic(entity)
    run.start()
    run.wait_until_steps(3)
    first = broker.leader(topic)
    broker.cut_off(first)
    seconds = run.recovers_within(EVERYTHING_SECONDS)
    pid = broker.nodes[first].pid
    assert pid is not None, "it was cut off, not killed"

    broker.reunite()
    reunited = run.recovers_within(BROKER_SECONDS)
    run.wait_until(
        lambda: broker.is_whole(""),
        "the node that was cut off has caught up",
        timeout_seconds=BROKER_SECONDS,
    )
    assert broker.nodes[first].pid == pid
    assert run.state.num_steps < run.config.run.num_steps, (
        "all this was done within the run, not after it"
    )
    print(f"seconds: cut off {seconds:.1f}, reunited {reunited:.1f}")

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
