"""The controller dies before and after each record of a scaling request: its successor resumes the
request from the log.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances, failpoint_marker
from scaling_calls import API, outcomes, scale, state_of, wait_until_over

from relax_events.projections.scale_requests import Status

POINTS = {
    "before and after the first": [
        "controller.before_command",  # nothing is written
        "controller.after_command",  # the request to grow is open
        "controller.before_command:2",  # it is ACTIVE, the call to shrink is not written
    ],
    "before the outcome and after the last": [
        "controller.before_command:2",  # all serve, the outcome is not written
        "controller.after_command:2",  # the request to shrink is open
    ],
    "after the outcome": ["controller.after_command:2"],  # ACTIVE
}


def call(run: FaultRun, *words: str) -> str:
    """Call until a controller answers, as a script does: the key keeps a call that is repeated from
    being a second one."""
    answers = []

    def is_answered() -> bool:
        answers.append(scale(run, *words))
        return answers[-1][0] == 0

    run.wait_until(is_answered, f"`relax scale {' '.join(words)}` is answered")
    return str(answers[-1][1]["request_id"])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_scaling_completes_when_the_controller_is_killed_at_any_record(
    points: list[str], start_run: Callable[..., FaultRun]
) -> None:
    run = start_run(run={"num_steps": 12}, workers={"max_restarts": len(points) + 1}, **API)
    armed = [f"{point}=kill" for point in points]
    run.arm(*armed)
    run.start()
    run.wait_until_steps(1)
    run.signal(signal.SIGSTOP, "trainer-0")  # so that the run is not over before
    grown = call(run, "--up-to", "2", "--key", "grow")
    assert wait_until_over(run, grown) is Status.ACTIVE
    run.wait_until(lambda: run.is_ready("rollout-1"), "the new worker is ready")
    limit = ("--timeout-seconds", "300")  # a busy machine is no failure
    shrunk = call(run, "--down-to", "1", "--yes", "--key", "shrink", *limit)
    assert wait_until_over(run, shrunk) is Status.COMPLETED
    run.signal(signal.SIGCONT, "trainer-0")

    assert run.fired() == {failpoint_marker(point) for point in armed}
    assert (outcomes(run, grown), outcomes(run, shrunk)) == (["ACTIVE"], [])
    left = state_of(run)
    assert ([*left.requests], left.workers) == ([grown, shrunk], {})
    assert set(run.running_workers()) == set(run.worker_ids)
    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["rollouts_regenerated"], ledger["outcomes"]["failed"]) == (0, 0)
