"""Admission of scaling requests: workers to start, workers to drain, and the errors of rejected
requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax_events.config import SGLangConfig
from relax_events.controller.metrics import ScaleMetrics
from relax_events.controller.scaling_admission import (
    ConflictError,
    NotFoundError,
    RejectedError,
    ScaleCommand,
    admit,
    require_cancellable,
)
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.parts import Command
from relax_events.events.types import RunCommanded
from relax_events.projections.run_state import RunState
from relax_events.projections.scale_requests import Kind, ScaleRequest, Status
from relax_events.projections.scaling import KEPT_MICROS, MAX_ENDED_KEPT, ExitReason, ScaleState
from relax_events.runtime.control_follower import drop_superseded
from tests.unit.run_events import run_config

SECOND = 1_000_000
BOUNDS = ScalingBounds.from_config(run_config(), is_supervised=True)
A, B = "http://127.0.0.1:30000", "http://127.0.0.1:30001"


def opened(state: ScaleState, *, now: int = 10, **asked: Any) -> ScaleRequest:
    found = admit(state, BOUNDS, ScaleCommand(**asked), now=now * SECOND)
    assert found.request is not None
    assert found.is_new
    state.apply(found.request.open_command(reason=found.text))
    return found.request


def ended(state: ScaleState, request: ScaleRequest, *statuses: Status) -> ScaleState:
    """Move a request through these statuses, and let the removed workers exit."""
    for status in statuses:
        state.apply(request.status_command(status, now=20 * SECOND))
    for worker in list(state.workers.values()):
        if worker.desired_state == "leaving":
            state.apply(worker.exit_command(ExitReason.DRAINED, "it drained"))
    return state


def scaled(**asked: Any) -> ScaleState:
    """Return a run that was scaled out before."""
    state = ScaleState()
    return ended(state, opened(state, kind=Kind.OUT, **asked), Status.CREATING, Status.ACTIVE)


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
    ended(state, gone, Status.DRAINING, Status.COMPLETED)
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
        state.apply(request.open_command(reason="asked"))
    assert (state.requests[second.request_id].status, state.requests[first.request_id].status) == (
        Status.FAILED,
        Status.PENDING,
    )
    assert state.requests[second.request_id].error == f"request {first.request_id} came first"
    assert list(state.workers) == ["rollout-1"]


def test_only_open_scale_out_requests_can_be_cancelled() -> None:
    state = ScaleState()
    request = opened(state, kind=Kind.OUT, target=2)
    assert (
        require_cancellable(state.requests[request.request_id])
        is state.requests[request.request_id]
    )
    ended(state, request, Status.CREATING, Status.ACTIVE)
    with pytest.raises(RejectedError, match="is ACTIVE; only what has not ended can be cancelled"):
        require_cancellable(state.requests[request.request_id])
    with pytest.raises(RejectedError, match="which can't be cancelled; add them again"):
        require_cancellable(opened(state, kind=Kind.IN, target=1))


def test_malformed_scaling_records_are_ignored() -> None:
    state = scaled(target=2)
    before = dict(state.requests)
    (request_id,) = before
    given = opened(ScaleState(), kind=Kind.OUT, target=2).open_command(reason="asked").arguments
    strange = (
        {"workers": "rollout-x"},
        {"workers": ""},
        {"urls": f"{A} {B}"},
        {"timeout": "soon"},
        {"kind": "sideways"},
    )
    steps = (
        {"request": request_id, "status": status} for status in ("SLEEPING", "DRAINING", "CREATING")
    )
    for arguments in (*(given | odd for odd in strange), *steps, {}, {"request": "x"}):
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
            Status.CREATING,
            Status.REMOVING,
            Status.FAILED,
        )
    assert (len(state.requests), sum(state.num_ended.values())) == (len(numbers), len(numbers))
    again = admit(
        state, BOUNDS, ScaleCommand(kind=Kind.OUT, target=2, key="key-0"), now=30 * SECOND
    )
    assert not again.is_new  # the call of a caller that lost the answer, hundreds of requests ago
    late = opened(state, kind=Kind.OUT, target=2)
    state.apply(late.status_command(Status.FAILED, now=20 * SECOND + KEPT_MICROS + 1))
    assert len(state.requests) == MAX_ENDED_KEPT
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
        request.open_command(reason="asked"),
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
    opened(state, kind=Kind.IN, target=2)
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
    ) == (3, 1)
