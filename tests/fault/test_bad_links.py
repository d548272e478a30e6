"""The link between a run and its broker is slow, silent, cut repeatedly, or down, and recovers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from harness import BROKER_SECONDS, FaultRun, assert_ledger_balances
from link import Link
from node import Node, choose_ports, node_behind_link

REQUEST_SECONDS = 5.0
SILENT_SECONDS = 8.0
NUM_RESETS = 8
DOWN_SECONDS = 6.0


@pytest.fixture
def broker(directory: Path, run_id: str, link: Link) -> Iterator[Node]:
    """Yield a broker that the run reaches only over the link, and the test directly."""
    (port,) = choose_ports(1)
    with node_behind_link(
        directory / f"{run_id}-node", port=port, linked_port=link.target_port, link_port=link.port
    ) as node:
        yield node


@pytest.mark.long
def test_run_continues_over_bad_links(start_run: Callable[..., FaultRun], link: Link) -> None:
    run = start_run(
        run={"num_steps": 50},
        broker={"bootstrap_servers": link.address, "request_timeout_seconds": REQUEST_SECONDS},
    )
    run.start()
    run.wait_until_steps(4)

    link.latency_seconds, link.bytes_per_second = 0.1, 200_000.0  # 200 ms there and back
    run.recovers_within(BROKER_SECONDS)
    link.heal()
    healed = [run.recovers_within(BROKER_SECONDS)]

    link.fall_silent()
    before = run.state.num_steps
    run.follow_for(SILENT_SECONDS)
    assert run.state.num_steps <= before + 2, "nothing comes over a silent link"
    link.heal()
    healed.append(run.recovers_within(BROKER_SECONDS))

    random = Random(0)
    num_cut = 0
    for _ in range(NUM_RESETS):
        num_cut += link.reset()
        run.follow_for(random.uniform(0.1, 1.0))
    assert num_cut > NUM_RESETS, "there were connections to be cut"
    healed.append(run.recovers_within(BROKER_SECONDS))

    link.go_down()
    before = run.state.num_steps
    run.follow_for(DOWN_SECONDS)
    assert run.state.num_steps <= before + 2, "nothing comes over a link that is down"
    link.heal()
    healed.append(run.recovers_within(BROKER_SECONDS))
    assert run.state.num_steps < run.config.run.num_steps, (
        "all this was done within the run, not after it"
    )
    print(
        "seconds from healing, slow, silent, reset, down:",
        *(f"{seconds:.1f}" for seconds in healed),
    )

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
