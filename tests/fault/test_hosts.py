"""A run over five hosts survives cut links, and its ledger is clean."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_network import Network, NotPermitted
from hosts_run import HostsRun, hosts_run

pytestmark = pytest.mark.long
NUM_STEPS = 30
STEP_SECONDS = 900.0
CUT_SECONDS = 8.0


@pytest.fixture
def hosts(tmp_path: Path, run_id: str) -> Iterator[tuple[Network, HostsRun]]:
    try:
        with hosts_run(tmp_path, run_id=run_id, num_steps=NUM_STEPS) as made:
            yield made
    except NotPermitted as error:
        pytest.skip(str(error))


@pytest.mark.timeout(3600)
def test_run_over_hosts_survives_cut_links(
    hosts: tuple[Network, HostsRun],
) -> None:
    network, run = hosts
    run.start()

    def reach(version: int) -> None:
        run.watch(
            lambda: run.policy_version >= version,
            what=f"policy version {version}",
            seconds=STEP_SECONDS,
        )

    reach(2)
    network.cut("engine-1")
    time.sleep(CUT_SECONDS)
    network.heal("engine-1")
    reach(run.policy_version + 2)
    starts = run.num_starts("trainer-0", "trainer")
    network.cut("trainer-1")
    run.watch(
        lambda: run.num_starts("trainer-0", "trainer") > starts,
        what="a new start of rank 0, whose peer is cut off",
        seconds=STEP_SECONDS,
    )
    assert not run.has_ended
    network.heal("trainer-1")
    reach(run.policy_version + 2)
    run.watch(lambda: run.has_ended, what="the run's end", seconds=STEP_SECONDS)
    assert run.policy_version == NUM_STEPS
    run.relax("ledger", "check", "run.json")
