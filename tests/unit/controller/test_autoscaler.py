"""When the autoscaler requests more or fewer workers, by table; and that it uses the same requests
as any caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from relax_events.config import AutoscalerConfig, RunConfig
from relax_events.controller.autoscaler import Autoscaler, Observation, decide
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_service import ScalingService
from relax_events.events.types import MetricsReported, RunCommanded
from relax_events.projections.run_state import RunState
from relax_events.projections.scale_requests import Kind, Status
from relax_events.projections.scaling import ScaleState
from tests.unit.run_events import make_heartbeat, run_config, train_step

SECOND = 1_000_000
RULES = AutoscalerConfig(enabled=True)
POOL = ScalingBounds.from_config(run_config(), is_supervised=True).pools["default"]
BUSY = Observation(
    at=0, num_workers=3, usage=0.95, queued=20.0, groups_per_second=5.0, wait=0.8, staleness=0.2
)
CALM = Observation(
    at=0, num_workers=3, usage=0.6, queued=1.0, groups_per_second=5.0, wait=0.2, staleness=0.2
)
IDLE = Observation(
    at=0, num_workers=3, usage=0.2, queued=0.0, groups_per_second=5.0, wait=0.0, staleness=0.2
)


def over(
    seconds: float,
    look: Observation = CALM,
    *,
    every: float = 10.0,
    before: Observation = CALM,
    **changes: Any,
) -> list[Observation]:
    """Return observations of 300 s; the last seconds have these changes."""
    times = [every * index for index in range(int(300 / every) + 1)]
    return [
        replace(
            replace(look, **changes) if 300 - time <= seconds else before, at=int(time * SECOND)
        )
        for time in times
    ]


def verdict(
    looks: Sequence[Observation], *, num_wanted: int = 3, last_out_at: int = 0, last_in_at: int = 0
) -> tuple[str, int] | None:
    found = decide(
        looks,
        RULES,
        POOL,
        num_wanted=num_wanted,
        last_out_at=last_out_at * SECOND,
        last_in_at=last_in_at * SECOND,
    )
    return None if found is None else (found.kind.value, found.target)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        (over(300), None),
        (over(30, usage=0.9), ("out", 7)),
        (over(20, usage=0.9), None),  # not for 30 s
        (over(30, usage=0.85), None),  # not above
        (over(30, queued=11.0), ("out", 7)),
        (over(20, queued=11.0), None),
        (over(30, queued=10.0), None),
        (over(30, wait=0.6), ("out", 7)),
        (over(30, BUSY, wait=0.01, staleness=0.95), None),  # samples wait for the trainer
        (over(30, BUSY, wait=0.01, staleness=0.5), ("out", 7)),
        (over(30, BUSY, wait=0.2, staleness=0.95), ("out", 7)),
        (over(30, BUSY, usage=None, queued=None, wait=None), None),  # unknown
        (over(300, BUSY, num_workers=0), None),
        (over(120, IDLE), ("in", 2)),
        (over(110, IDLE), None),
        (over(120, IDLE, usage=0.3), None),
        (over(120, IDLE, queued=0.1), None),
        (over(120, IDLE, queued=None), None),
        (over(120, IDLE, groups_per_second=None), None),
        ([], None),
        (over(300)[-1:], None),
    ],
)
def test_autoscaler_verdict_follows_from_the_observations(
    looks: list[Observation], expected: tuple[str, int] | None
) -> None:
    assert verdict(looks, last_in_at=-1000, last_out_at=-1000) == expected


def test_autoscaler_scales_in_only_with_spare_capacity_and_steady_load() -> None:
    assert verdict(over(120, IDLE, usage=0.28), num_wanted=2, last_in_at=-1000) is None, (
        "0.28 of two is 0.56 of one"
    )
    assert verdict(over(120, IDLE, usage=0.24), num_wanted=2, last_in_at=-1000) == ("in", 1)
    looks = over(120, IDLE)
    uneven = [
        replace(look, groups_per_second=10.0 * (index % 2)) for index, look in enumerate(looks)
    ]
    assert verdict(uneven) is None


def test_autoscaler_respects_worker_bounds() -> None:
    assert verdict(over(30, BUSY), num_wanted=30, last_out_at=-1000) == ("out", 32)
    assert verdict(over(30, BUSY), num_wanted=32, last_out_at=-1000) is None
    assert verdict(over(120, IDLE), num_wanted=1, last_in_at=-1000) is None


@pytest.mark.parametrize(("num_wanted", "target"), [(9, 8), (10, 8), (19, 17), (20, 17)])
def test_autoscaler_removes_one_worker_more_than_a_tenth(num_wanted: int, target: int) -> None:
    assert verdict(over(120, IDLE), num_wanted=num_wanted, last_in_at=-1000) == ("in", target)


@pytest.mark.parametrize(
    ("look", "last_out_at", "last_in_at", "expected"),
    [
        (BUSY, 241, -1000, None),
        (BUSY, 240, -1000, ("out", 7)),
        (BUSY, -1000, 299, ("out", 7)),
        (IDLE, 1, -1000, None),
        (IDLE, -1000, 1, None),
        (IDLE, 0, 0, ("in", 2)),
    ],
)
def test_autoscaler_waits_for_a_cooldown_after_a_change(
    look: Observation, last_out_at: int, last_in_at: int, expected: tuple[str, int] | None
) -> None:
    assert verdict(over(120, look), last_out_at=last_out_at, last_in_at=last_in_at) == expected


def controller(
    config: RunConfig, log: list[RunCommanded]
) -> tuple[Autoscaler, RunState, ScalingService]:
    """Return the autoscaler of a controller that has just read the log."""
    run, state = RunState(), ScaleState()
    for command in log:
        state.apply(command)

    def give(commands: Sequence[RunCommanded]) -> None:
        for command in commands:
            log.append(command)
            state.apply(command)

    bounds = ScalingBounds.from_config(config, is_supervised=True)
    service = ScalingService(state, bounds, give, record=lambda _: None)
    return Autoscaler(config, run, service), run, service


def hear(run: RunState, service: ScalingService) -> None:
    """Let one worker hold 3 of its 4 prompt groups, and the trainer wait for three quarters of a
    step."""
    service.state.apply(make_heartbeat("rollout-0", at_seconds=1))
    run.apply(
        MetricsReported(worker_id="rollout-0", role="rollout", values={"records_per_second": 2.0})
    )
    run.apply(train_step(0, at_seconds=1, staleness_mean=1.0))


def test_autoscaler_logs_requests_and_its_successor_keeps_the_cooldown(
    make_run_config: Callable[..., RunConfig],
) -> None:
    config = make_run_config(
        scaling={"autoscaler": {"enabled": True}},
        engine={"max_prompt_groups": 4},
        run={"max_staleness": 2},
    )
    log: list[RunCommanded] = []
    autoscaler, run, service = controller(config, log)
    hear(run, service)
    seen = autoscaler.observe(now=5, num_unfinished=43)
    assert seen == Observation(
        at=5,
        num_workers=1,
        usage=0.75,
        queued=40.0,
        groups_per_second=2.0,
        wait=0.75,
        staleness=0.5,
    )
    now = 10**15
    for index in range(5):
        autoscaler.poll(now=now + index * 10 * SECOND, num_unfinished=43)
    (request,) = service.state.requests.values()
    assert (request.kind, request.workers, request.command.key.partition("/")[0]) == (
        Kind.OUT,
        tuple(f"rollout-{n}" for n in range(1, 5)),
        "autoscaler",
    )
    log.append(request.end(Status.ACTIVE, now=now).to_record())

    later, run, service = controller(config, log)
    hear(run, service)
    begin = request.created_at
    for index in range(6):
        later.poll(now=begin + index * 10 * SECOND, num_unfinished=430)
    assert len(service.state.requests) == 1, "a minute has not passed"
    later.poll(now=begin + 60 * SECOND, num_unfinished=430)
    assert len(service.state.requests) == 2


def test_worker_that_holds_more_than_its_lanes_hides_no_idle_one(
    make_run_config: Callable[..., RunConfig],
) -> None:
    autoscaler, _, service = controller(make_run_config(engine={"max_prompt_groups": 4}), [])
    for worker, num_in_flight in (("rollout-0", 9), ("rollout-1", 1)):
        service.state.apply(
            replace(make_heartbeat(worker, at_seconds=1), num_in_flight=num_in_flight)
        )
    assert autoscaler.observe(now=5, num_unfinished=10).usage == 0.625


def test_autoscaler_is_off_by_default() -> None:
    log: list[RunCommanded] = []
    autoscaler, run, service = controller(run_config(), log)
    hear(run, service)
    for index in range(60):
        autoscaler.poll(now=index * 10 * SECOND, num_unfinished=10_000)
    assert log == []
