"""An autoscaler outside the run sets pods to the desired number: requests of the scaling API end by
what the workers' heartbeats say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from relax_events.controller.metrics import ScaleMetrics
from relax_events.controller.scaling_admission import ConflictError, RejectedError
from relax_events.controller.scaling_bounds import CONFIRM_SECONDS, ScalingBounds
from relax_events.controller.scaling_decisions import find_exits
from relax_events.controller.scaling_service import ScalingService
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import RunCommanded
from relax_events.projections.scale_requests import Kind, ScaleCommand, Status
from relax_events.projections.scaling import ScaleState
from tests.unit.run_events import make_heartbeat, run_config

BOUNDS = replace(
    ScalingBounds.from_config(run_config(), is_supervised=False), has_external_autoscaler=True
)


class Run:
    """A controller's scaling, without its broker: commands are applied to the state."""

    def __init__(self) -> None:
        self.state = ScaleState()
        self.service = ScalingService(self.state, BOUNDS, self._apply, record=lambda _: None)

    def _apply(self, commands: Sequence[RunCommanded]) -> None:
        for command in commands:
            self.state.apply(command)

    def turn(self, worker_state: WorkerState | None = None, *worker_ids: str) -> None:
        """Take heartbeats, and do one turn of the controller's loop."""
        for worker_id in worker_ids:
            assert worker_state is not None
            sent_at = now_micros() / 1e6 + 1
            self.state.apply(make_heartbeat(worker_id, at_seconds=sent_at, state=worker_state))
        self.service.reconcile()

    def scale(self, kind: Kind, target: int, **more: Any) -> str:
        """Open a request."""
        command = ScaleCommand(kind=kind, target=target, **more)
        return self.service.scale(command, dry_run=False).request_id or ""

    def status(self, request_id: str) -> Status:
        """Return the status of a request."""
        return self.state.status(self.state.requests[request_id], now=now_micros())

    @property
    def num_desired(self) -> float:
        """The gauge that the autoscaler reads."""
        return next(
            sample.value
            for metric in ScaleMetrics(self.state, BOUNDS).collect()
            for sample in metric.samples
            if (sample.name, sample.labels["role"]) == ("relax_workers_desired", "rollout")
        )


@pytest.fixture
def run() -> Run:
    return Run()


def test_scale_out_raises_the_desired_number_and_ends_when_the_pods_serve(run: Run) -> None:
    assert run.num_desired == 1
    request = run.scale(Kind.OUT, 3)
    assert run.state.requests[request].workers == ("rollout-1", "rollout-2")
    run.turn()
    assert (run.num_desired, run.status(request)) == (3, Status.PENDING)
    run.turn(WorkerState.IDLE, "rollout-1", "rollout-2")
    assert run.status(request) is Status.ACTIVE


def test_scale_in_is_completed_once_the_last_pods_have_drained(run: Run) -> None:
    run.scale(Kind.OUT, 3)
    run.turn(WorkerState.IDLE, "rollout-1", "rollout-2")
    request = run.scale(Kind.IN, 1)
    run.turn()
    assert (run.num_desired, run.status(request)) == (1, Status.PENDING)
    with pytest.raises(ConflictError, match="rollout-1 still leaves; repeat the call"):
        run.scale(Kind.OUT, 2, model="default")
    run.turn(WorkerState.STOPPED, "rollout-1", "rollout-2")
    assert (list(run.state.workers), run.status(request)) == ([], Status.COMPLETED)
    assert run.state.requests[run.scale(Kind.OUT, 2)].workers == ("rollout-1",)


def test_leaving_pod_that_was_killed_is_gone_once_it_is_silent(run: Run) -> None:
    run.scale(Kind.OUT, 2)
    run.turn(WorkerState.IDLE, "rollout-1")
    run.scale(Kind.IN, 1)
    run.turn()
    heard_at = run.state.last_heartbeats["rollout-1"].sent_at
    silence = int(CONFIRM_SECONDS * 1e6)
    assert find_exits(run.state, BOUNDS, now=heard_at + silence) == []
    (left,) = find_exits(run.state, BOUNDS, now=heard_at + silence + 1)
    assert (left.worker_id, left.arguments) == ("rollout-1", {"left": "killed"})
    supervised = replace(BOUNDS, has_external_autoscaler=False)
    assert find_exits(run.state, supervised, now=heard_at + silence + 1) == []


def test_request_whose_pods_do_not_serve_in_time_is_rolled_back(run: Run) -> None:
    request = run.scale(Kind.OUT, 2, timeout_seconds=0.0)
    run.turn()
    assert run.status(request) is Status.FAILED
    assert "rollout-1 did not serve within 0 s" in run.state.requests[request].error
    assert run.num_desired == 1


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"kind": Kind.OUT, "target": 0, "urls": ("http://a:1",)}, "engine_urls: the pods of a"),
        ({"kind": Kind.IN, "target": 1, "force": True}, "leave force out"),
    ],
)
def test_command_that_a_stateful_set_can_not_carry_out_is_refused(
    run: Run, asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(RejectedError, match=text):
        run.service.scale(ScaleCommand(**asked), dry_run=False)


def test_change_that_kubernetes_would_ignore_is_refused(run: Run) -> None:
    run.scale(Kind.OUT, 19)
    run.turn(WorkerState.IDLE, *(f"rollout-{index}" for index in range(1, 19)))
    for kind, target in ((Kind.OUT, 21), (Kind.IN, 18)):
        with pytest.raises(RejectedError, match="ignores a change of at most a tenth"):
            run.scale(kind, target)
    assert run.scale(Kind.IN, 17)
