"""The autoscaler adapts the number of rollout workers of a real run: one more while prompts wait,
one fewer while none arrive.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances
from scaling_calls import state_of, wait_until_over

from relax_events.projections.scale_requests import Kind, ScaleRequest, Status

QUICK = {
    "enabled": True,
    "out_queue_prompt_groups": 1,
    "out_seconds": 2,
    "in_seconds": 6,
}


def asked(run: FaultRun, kind: Kind) -> list[ScaleRequest]:
    """Return the requests that only the autoscaler can have made."""
    requests = state_of(run).requests.values()
    return [
        request
        for request in requests
        if request.kind is kind and request.command.key.startswith("autoscaler/")
    ]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_autoscaler_adds_workers_for_queued_prompts_and_removes_idle_ones(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(
        run={"num_steps": 120},
        engine={"max_prompt_groups": 2},
        scaling={"max_workers": 2, "autoscaler": QUICK},
    )
    run.start()
    run.wait_until(lambda: bool(asked(run, Kind.OUT)), "another worker is asked for")
    (grown,) = asked(run, Kind.OUT)
    assert (grown.workers, grown.target) == (("rollout-1",), 2)
    run.signal(signal.SIGSTOP, "trainer-0")  # so that there is work left when it comes
    assert wait_until_over(run, grown.request_id) is Status.ACTIVE
    run.signal(signal.SIGCONT, "trainer-0")
    run.wait_until(lambda: run.num_taken("rollout-1") > 0, "it has taken prompt groups")

    run.signal(signal.SIGSTOP, "trainer-0")  # no version comes, so the prompts run out
    run.wait_until(lambda: bool(asked(run, Kind.IN)), "a worker is sent away")
    (shrunk,) = asked(run, Kind.IN)
    assert (shrunk.workers, shrunk.target) == (("rollout-1",), 1)
    assert wait_until_over(run, shrunk.request_id) is Status.COMPLETED
    run.signal(signal.SIGCONT, "trainer-0")

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["rollouts_regenerated"], ledger["outcomes"]["failed"]) == (0, 0)
    assert [line["direction"] for line in run.logged("controller-0", "scaling.requested")][:2] == [
        "out",
        "in",
    ]
