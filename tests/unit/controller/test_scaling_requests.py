"""Admission of scaling requests: workers to start, workers to drain, and the errors of rejected
requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from relax_events.config import SGLangConfig
from relax_events.controller.metrics import ScaleMetrics
from relax_events.controller.scaling_admission import (
    ConflictError,
    NotFoundError,
    RejectedError,
    admit,
    cancel,
)
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import RunCommanded
from relax_events.projections.run_state import RunState
from relax_events.projections.scale_requests import Kind, ScaleCommand, ScaleRequest, Status
from relax_events.projections.scaling import KEPT_MICROS, MAX_ENDED_KEPT, ExitReason, ScaleState
from relax_events.runtime.control_follower import drop_superseded
from tests.unit.run_events import make_heartbeat, run_config

SECOND = 1_000_000
BOUNDS = ScalingBounds.from_config(run_config(), is_supervised=True)
A, B = "http://127.0.0.1:30000", "http://127.0.0.1:30001"


def opened(state: ScaleState, *, now: int = 10, **asked: Any) -> ScaleRequest:
    found = admit(state, BOUNDS, ScaleCommand(**asked), now=now * SECOND)
    assert found.request is not None
    assert found.is_new
    state.apply(found.request.to_record(reason=found.text))
    return found.request


def ended(
    state: ScaleState, request: ScaleRequest, outcome: Status | None = None, *, at: int = 20
) -> ScaleState:
    """End a request, and let the workers that leave exit."""
    if outcome is not None:
        returned = () if outcome is Status.ACTIVE else request.workers
        over = request.end(
            outcome, now=at * SECOND, exit_deadline=(at + 9) * SECOND, returned=returned
        )
        state.apply(over.to_record())
    for worker in [worker for worker in state.workers.values() if worker.is_leaving]:
        exit_command = worker.exit_command(ExitReason.DRAINED, "it drained")
        state.apply(replace(exit_command, commanded_at=at * SECOND))
    return state


def status(state: ScaleState, request: ScaleRequest, *, at: int = 21) -> Status:
    return state.status(state.requests[request.request_id], now=at * SECOND)


def scaled(**asked: Any) -> ScaleState:
    """Return a run that was scaled out before."""
    state = ScaleState()
    return ended(state, opened(state, kind=Kind.OUT, **asked), Status.ACTIVE)


def test_scaling_target_is_absolute_and_includes_initial_workers() -> None:
    state = ScaleState()
    assert opened(state, kind=Kind.OUT, target=3).workers == ("rollout-1", "rollout-2")
    assert (
        admit(scaled(target=3), BOUNDS, ScaleCommand(kind=Kind.OUT, target=3), now=0).request
        is None
    )
    assert (
        admit(scaled(target=3), BOUNDS, ScaleCommand(kind=Kind.OUT, target=2), now=0).text
        == "workers of default there are: 3"
    )
    assert opened(scaled(target=3), kind=Kind.OUT, target=4).workers == ("rollout-3",)


def test_scale_in_removes_newest_workers_and_names_are_never_reused() -> None:
    state = scaled(target=4)
    gone = opened(state, kind=Kind.IN, target=2)
    assert gone.workers == ("rollout-3", "rollout-2")
    ended(state, gone)
    assert status(state, gone) is Status.COMPLETED
    assert list(state.workers) == ["rollout-1"]
    assert opened(state, kind=Kind.OUT, target=3).workers == ("rollout-4",)


def test_external_servers_are_attached_once_and_detached_by_url() -> None:
    state = scaled(urls=(A, A + "/"))
    assert [worker.url for worker in state.workers.values()] == [A]
    assert opened(state, kind=Kind.OUT, urls=(A, B)).urls == (B,)
    state = scaled(urls=(A, B))
    assert opened(state, kind=Kind.IN, urls=(A,)).workers == ("rollout-1",)


def test_servers_of_the_run_file_are_not_shared_with_added_workers() -> None:
    config = run_config()
    engine = config.engine.model_copy(
        update={"name": "sglang", "sglang": SGLangConfig(urls=(A + "/",))}
    )
    bounds = ScalingBounds.from_config(
        config.model_copy(update={"engine": engine}), is_supervised=True
    )
    with pytest.raises(
        RejectedError,
        match="servers of the run file have theirs; name other servers in engine_urls",
    ):
        admit(ScaleState(), bounds, ScaleCommand(kind=Kind.OUT, target=2), now=0)
    assert (
        admit(ScaleState(), bounds, ScaleCommand(kind=Kind.OUT, urls=(A,)), now=0).text
        == "all these servers are attached already"
    )
    found = admit(ScaleState(), bounds, ScaleCommand(kind=Kind.OUT, urls=(A, B)), now=0).request
    assert found is not None
    assert found.urls == (B,)


def test_repeated_call_with_the_same_key_creates_no_second_request() -> None:
    state = ScaleState()
    first = opened(state, kind=Kind.OUT, target=3, key="k")
    again = admit(state, BOUNDS, ScaleCommand(kind=Kind.OUT, target=3, key="k"), now=99)
    assert (again.request, again.is_new) == (state.requests[first.request_id], False)
    with pytest.raises(
        ConflictError,
        match=r"the key k belongs to request scale-out-.*, with other arguments; take another key",
    ):
        admit(state, BOUNDS, ScaleCommand(kind=Kind.OUT, target=4, key="k"), now=99)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"target": 0}, RejectedError, "neither is given; give num_replicas >= 1 or engine_urls"),
        ({"target": 2, "urls": (A,)}, RejectedError, "both is given"),
        (
            {"target": 33},
            RejectedError,
            "33 workers of default are more than 32: scaling.max_workers = 32",
        ),
        (
            {"target": 9, "model": "reward"},
            RejectedError,
            "9 workers of reward are more than 8: each needs a partition, and there are 8",
        ),
        (
            {"target": 2, "model": "critic"},
            NotFoundError,
            "this run has no model 'critic'; there is default, reward",
        ),
        (
            {"urls": ("ftp://x",)},
            RejectedError,
            "'ftp://x' is no address of a server; give http://host:port",
        ),
        ({"urls": ("http://h:99999",)}, RejectedError, "is no address of a server"),
        ({"urls": ('http://h:1/" x',)}, RejectedError, "is no address of a server"),
        (
            {"urls": (A,), "model": "reward"},
            RejectedError,
            "engine_urls are of servers for model 'default', got model 'reward'",
        ),
        ({"target": 0, "kind": Kind.IN}, RejectedError, "neither is given"),
        (
            {"urls": (B,), "kind": Kind.IN},
            RejectedError,
            (
                "no worker that was added is attached to 'http://127.0.0.1:30001'; workers of "
                "the start stay"
            ),
        ),
    ],
)
def test_impossible_scaling_call_is_rejected_with_the_reason(
    asked: dict[str, Any], error: type[RejectedError], text: str
) -> None:
    with pytest.raises(error) as refusal:
        admit(ScaleState(), BOUNDS, ScaleCommand(**{"kind": Kind.OUT} | asked), now=0)
    assert text in str(refusal.value)


def test_initial_workers_cannot_be_scaled_in() -> None:
    bounds = ScalingBounds.from_config(
        run_config().model_copy(
            update={"workers": run_config().workers.model_copy(update={"rollout": 2})}
        ),
        is_supervised=True,
    )
    with pytest.raises(
        RejectedError,
        match=(
            "the run starts with 2 workers of default, and they stay; num_replicas must be >= "
            "2, got 1"
        ),
    ):
        admit(ScaleState(), bounds, ScaleCommand(kind=Kind.IN, target=1), now=0)


def test_unsupervised_run_rejects_scaling_and_says_where_to_scale() -> None:
    with pytest.raises(
        RejectedError,
        match=r"were not started by `relax run`.*scale the service rollout where it was started",
    ):
        admit(
            ScaleState(),
            replace(BOUNDS, is_supervised=False),
            ScaleCommand(kind=Kind.OUT, target=2),
            now=0,
        )


def test_only_one_scaling_request_is_open_per_model() -> None:
    state = ScaleState()
    first = opened(state, kind=Kind.OUT, target=2)
    with pytest.raises(
        ConflictError,
        match=f"request {first.request_id} for default is PENDING; wait for its end, or cancel it",
    ):
        admit(state, BOUNDS, ScaleCommand(kind=Kind.OUT, target=3), now=0)
    assert opened(state, kind=Kind.OUT, target=2, model="reward").workers == ("reward-1",)


def test_second_of_two_concurrent_scaling_requests_fails() -> None:
    state = ScaleState()
    first, second = (
        opened(ScaleState(), kind=Kind.OUT, target=2),
        opened(ScaleState(), kind=Kind.OUT, target=3),
    )
    for request in (first, second):
        state.apply(request.to_record(reason="asked"))
    assert (status(state, second), status(state, first)) == (Status.FAILED, Status.PENDING)
    assert state.requests[second.request_id].error == f"request {first.request_id} came first"
    assert list(state.workers) == ["rollout-1"]


def test_only_open_scale_out_requests_can_be_cancelled() -> None:
    state = ScaleState()
    request = opened(state, kind=Kind.OUT, target=2)
    over = ScaleRequest.from_record(cancel(state, BOUNDS, request, now=15 * SECOND))
    assert over is not None
    assert (over.outcome, over.returned) == (Status.CANCELLED, ("rollout-1",))
    ended(state, request, Status.ACTIVE)
    active = state.requests[request.request_id]
    with pytest.raises(RejectedError, match="is ACTIVE; only what has not ended can be cancelled"):
        cancel(state, BOUNDS, active, now=21 * SECOND)
    with pytest.raises(RejectedError, match="which can't be cancelled; add them again"):
        cancel(state, BOUNDS, opened(state, kind=Kind.IN, target=1), now=21 * SECOND)


def test_status_of_a_request_follows_what_its_workers_report() -> None:
    state = ScaleState()
    state.policy_version = 7
    request = opened(state, kind=Kind.OUT, target=3)

    def hear(worker_state: WorkerState, version: int, *worker_ids: str) -> Status:
        for worker_id in worker_ids:
            heartbeat = make_heartbeat(worker_id, at_seconds=12, state=worker_state)
            state.apply(replace(heartbeat, policy_version=version))
        (newest,) = list(state.requests.values())[-1:]
        return status(state, newest, at=13)

    one, both = ("rollout-1",), ("rollout-1", "rollout-2")
    assert status(state, request) is Status.PENDING
    assert hear(WorkerState.STARTING, -1, *one) is Status.CREATING
    assert hear(WorkerState.STARTING, -1, *both) is Status.HEALTH_CHECKING
    assert hear(WorkerState.IDLE, 6, *both) is Status.WEIGHT_SYNCING
    assert hear(WorkerState.IDLE, 7, *one) is Status.WEIGHT_SYNCING
    assert hear(WorkerState.WORKING, 7, *both) is Status.READY
    assert hear(WorkerState.STARTING, -1, *one) is Status.HEALTH_CHECKING, "it starts again"
    ended(state, request, Status.ACTIVE, at=12)
    assert hear(WorkerState.STARTING, -1, *one) is Status.ACTIVE
    gone = opened(state, kind=Kind.IN, target=1)
    assert hear(WorkerState.WORKING, 7, *both) is Status.PENDING
    assert hear(WorkerState.DRAINING, 7, *one) is Status.DRAINING
    assert hear(WorkerState.STOPPED, 7, *one) is Status.DRAINING
    assert hear(WorkerState.STOPPED, 7, *both) is Status.REMOVING
    ended(state, gone, at=14)
    assert status(state, gone) is Status.COMPLETED


def test_exit_that_is_reported_late_does_not_change_the_status_again() -> None:
    state = scaled(target=2)
    gone = opened(state, kind=Kind.IN, target=1, timeout_seconds=5.0)
    late = gone.exit_deadline // SECOND + 1
    assert (status(state, gone, at=late - 1), status(state, gone, at=late)) == (
        Status.PENDING,
        Status.FAILED,
    )
    error = "no exit was reported in time of rollout-1"
    assert state.requests[gone.request_id].describe_error(now=late * SECOND) == error
    ended(state, gone, at=late)
    assert (list(state.workers), status(state, gone, at=late + 9)) == ([], Status.FAILED)
    assert state.requests[gone.request_id].describe_error(now=(late + 9) * SECOND) == error
    assert state.count_ended(now=late * SECOND)["rollout", Kind.IN, Status.FAILED] == 1


def test_malformed_scaling_records_are_ignored() -> None:
    state = scaled(target=2)
    before = dict(state.requests)
    (request_id,) = before
    other = opened(ScaleState(), kind=Kind.OUT, target=2)
    (ended_request,) = before.values()
    strange: tuple[dict[str, Any], ...] = (
        {"workers": ["rollout-x"]},
        {"workers": []},
        {"urls": [A, B]},
        {"timeout": "soon"},
        {"command": {"kind": "sideways"}},
        {"outcome": "SLEEPING"},
        {"outcome": "FAILED"},  # nothing has opened it
    )
    tree = orjson.loads(other.to_record().arguments["request"])
    texts = [
        *(orjson.dumps(tree | odd).decode() for odd in strange),
        replace(ended_request, outcome=Status.DRAINING).to_record().arguments["request"],
        ended_request.end(Status.FAILED, now=1, returned=["rollout-1"])
        .to_record()
        .arguments["request"],  # it has ended already
        "{",
    ]
    for arguments in (*({"request": text} for text in texts), {}, {"request": request_id}):
        state.apply(
            RunCommanded(command=Command.SCALE, role="rollout", reason="odd", arguments=arguments)
        )
    state.apply(
        RunCommanded(
            command=Command.SCALE,
            role="rollout",
            worker_id="rollout-77",
            reason="odd",
            arguments={"left": "drained"},
        )
    )
    assert (state.requests, list(state.workers)) == (before, ["rollout-1"])


def test_ended_requests_are_kept_for_days_and_the_newest_forever() -> None:
    state, numbers = ScaleState(), range(MAX_ENDED_KEPT + 105)
    for number in numbers:
        ended(
            state,
            opened(state, kind=Kind.OUT, target=2, key=f"key-{number}"),
            Status.FAILED,
        )
    assert (len(state.requests), state.count_ended(now=21 * SECOND).total()) == (
        len(numbers),
        len(numbers),
    )
    again = admit(
        state, BOUNDS, ScaleCommand(kind=Kind.OUT, target=2, key="key-0"), now=30 * SECOND
    )
    assert not again.is_new  # the call of a caller that lost the answer, hundreds of requests ago
    late = 21 + KEPT_MICROS // SECOND
    ended(state, opened(state, now=late, kind=Kind.OUT, target=2), Status.FAILED, at=late)
    assert len(state.requests) == MAX_ENDED_KEPT + 1
    assert state.count_ended(now=(late + 1) * SECOND).total() == len(numbers) + 1
    assert opened(state, kind=Kind.OUT, target=2).workers == (f"rollout-{len(numbers) + 2}",)


def test_scale_out_timeout_covers_server_start_and_model_load() -> None:
    config = run_config()
    assert BOUNDS.pools["default"].timeout == config.health.start_seconds * SECOND
    engine = config.engine.model_copy(
        update={
            "name": "sglang",
            "sglang": config.engine.sglang.model_copy(update={"start_seconds": 2000.0}),
        }
    )
    bounds = ScalingBounds.from_config(
        config.model_copy(update={"engine": engine}), is_supervised=True
    )
    assert bounds.pools["default"].timeout == 4000 * SECOND
    with pytest.raises(
        RejectedError,
        match=r"timeout_secs must be >= 4000, got 300: .* .engine.sglang.start_seconds",
    ):
        admit(
            ScaleState(),
            bounds,
            ScaleCommand(kind=Kind.OUT, target=2, timeout_seconds=300.0),
            now=1,
        )


def test_resumed_run_still_knows_its_added_workers() -> None:
    state = ScaleState()
    request = opened(state, kind=Kind.OUT, target=2)
    log = [
        request.to_record(reason="asked"),
        RunCommanded(command=Command.STOP, reason="over"),
        RunCommanded(command=Command.RESUME, reason="continue"),
    ]
    heard = ScaleState()
    for event in drop_superseded(log):
        heard.apply(event)
        RunState().apply(event)
    assert (list(heard.workers), heard.is_over) == (["rollout-1"], False)


def test_metrics_count_scaling_requests_and_desired_workers() -> None:
    state = scaled(target=3)
    opened(state, now=now_micros() // SECOND, kind=Kind.IN, target=2)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in ScaleMetrics(state, BOUNDS).collect()
        for sample in metric.samples
    }
    assert values["relax_scale_requests_total", "rollout", "out", "ACTIVE"] == 1
    assert values["relax_scale_requests_open", "rollout", "in", "PENDING"] == 1
    assert (
        values["relax_workers_desired", "rollout"],
        values["relax_workers_desired", "reward"],
    ) == (2, 1)
