"""The controller dies in every state of a scaling request: its successor resumes the request from
the log.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances, failpoint_marker
from scaling_calls import API, scale, state_of, statuses, wait_until_over

from relax_events.projections.scale_requests import Status

OUT = ["CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE"]
IN = ["DRAINING", "REMOVING", "COMPLETED"]
POINTS = {
    "before and after each of the first": [
        "controller.before_command",  # nothing is written
        "controller.after_command",  # PENDING
        "controller.before_command:2",  # CREATING
        "controller.after_command:2",  # WEIGHT_SYNCING
        "controller.before_command:3",  # ACTIVE, the call to shrink is not written
        "controller.after_command:3",  # REMOVING
    ],
    "in the states between": [
        "controller.after_command",  # PENDING
        "controller.after_command:2",  # HEALTH_CHECKING
        "controller.before_command:3",  # READY
        "controller.after_command:3",  # DRAINING
    ],
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
def test_scaling_completes_when_the_controller_is_killed_in_any_state(
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
    shrunk = call(run, "--down-to", "1", "--yes", "--key", "shrink")
    assert wait_until_over(run, shrunk) is Status.COMPLETED
    run.signal(signal.SIGCONT, "trainer-0")

    assert run.fired() == {failpoint_marker(point) for point in armed}
    assert (statuses(run, grown), statuses(run, shrunk)) == (OUT, IN), (
        "no step twice, none left out"
    )
    left = state_of(run)
    assert ([*left.requests], left.workers) == ([grown, shrunk], {})
    assert set(run.running_workers()) == set(run.worker_ids)
    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["rollouts_regenerated"], ledger["outcomes"]["failed"]) == (0, 0)
