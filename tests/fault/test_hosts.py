"""Runs over several hosts survive cut links and lost hosts, and their ledgers are clean."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from host_network import Network, NotPermitted
from hosts_run import AnyRun, HostsRun, OneCommandRun, hosts_run

pytestmark = pytest.mark.long
NUM_STEPS = 30
STEP_SECONDS = 900.0
CUT_SECONDS = 8.0
StartHosts = Callable[[type[AnyRun]], tuple[Network, AnyRun]]


@pytest.fixture
def start_hosts(tmp_path: Path, run_id: str) -> Iterator[StartHosts[HostsRun]]:
    with ExitStack() as stack:

        def start(kind: type[AnyRun]) -> tuple[Network, AnyRun]:
            try:
                network, run = stack.enter_context(
                    hosts_run(tmp_path, run_id=run_id, num_steps=NUM_STEPS, kind=kind)
                )
            except NotPermitted as error:
                pytest.skip(str(error))
            run.start()
            return network, run

        yield start


def reach(run: HostsRun, version: int) -> None:
    run.watch(
        lambda: run.policy_version >= version,
        what=f"policy version {version}",
        seconds=STEP_SECONDS,
    )


@pytest.mark.timeout(3600)
def test_run_over_hosts_survives_cut_links(start_hosts: StartHosts[HostsRun]) -> None:
    network, run = start_hosts(HostsRun)
    reach(run, 2)
    network.cut("engine-1")
    time.sleep(CUT_SECONDS)
    network.heal("engine-1")
    reach(run, run.policy_version + 2)
    starts = run.num_starts("trainer-0", "trainer")
    network.cut("trainer-1")
    run.watch(
        lambda: run.num_starts("trainer-0", "trainer") > starts,
        what="a new start of rank 0, whose peer is cut off",
        seconds=STEP_SECONDS,
    )
    assert not run.has_ended
    network.heal("trainer-1")
    reach(run, run.policy_version + 2)
    run.watch(lambda: run.has_ended, what="the run's end", seconds=STEP_SECONDS)
    assert run.policy_version == NUM_STEPS
    run.relax("ledger", "check", "run.json")


@pytest.mark.timeout(3600)
def test_run_by_one_command_survives_a_cut_and_a_killed_host(
    start_hosts: StartHosts[OneCommandRun],
) -> None:
    network, run = start_hosts(OneCommandRun)
    reach(run, 2)
    assert network.list_pids("engine-0")
    network.cut("engine-0")
    time.sleep(CUT_SECONDS)
    network.heal("engine-0")
    reach(run, run.policy_version + 2)

    for pid in network.list_pids("engine-0"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reach(run, run.policy_version + 2)
    assert "its supervisor ended with exit code" in run.log("broker", "run")
    assert run.num_starts("broker", "run") == 1

    assert run.interrupt() != 0
    assert not network.list_pids("engine-0"), "the interrupt drained the other host"
    run.watch(lambda: run.has_ended, what="the resumed run's end", seconds=STEP_SECONDS)
    assert run.num_starts("broker", "run") == 2
    assert run.policy_version == NUM_STEPS
    run.relax("ledger", "check", "run.json")
