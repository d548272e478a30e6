"""Scaling requests over generated runs: whichever process dies, and whenever, each request ends by
the rules, and a rolled-back request leaves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.controller.scaling_admission import (
    ConflictError,
    ScaleCommand,
    admit,
    require_cancellable,
)
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_decisions import decide
from relax_events.events.parts import WorkerState
from relax_events.events.types import Event, RunCommanded, WorkerHeartbeat
from relax_events.projections.scale_requests import STAGES, Kind, ScaleRequest, Status
from relax_events.projections.scaling import DesiredState, ExitReason, ScaleState
from tests.unit.run_events import make_heartbeat as make_heartbeat
from tests.unit.run_events import run_config

SECOND = 1_000_000
BOUNDS = ScalingBounds.from_config(run_config(), is_supervised=True)


def in_time(seconds: int) -> ScalingBounds:
    """Return bounds with this start timeout of workers."""
    return replace(
        BOUNDS,
        pools={
            name: replace(pool, timeout=seconds * SECOND) for name, pool in BOUNDS.pools.items()
        },
    )


OVER = {kind: STAGES[kind][-1] for kind in Kind}


@dataclass
class World:
    """A log, a controller and a supervisor; each may be killed, and its successor recovers from
    the log.

    Attributes:
        behaviour: What becomes of the workers that come, one after the other: `well`, `hangs` in
            its start, `breaks`, or is `stale`.
    """

    bounds: ScalingBounds = BOUNDS
    behaviour: list[str] = field(default_factory=list)
    now: int = 1000
    log: list[Event] = field(default_factory=list)
    alive: dict[str, str] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=dict)
    num_controllers: int = 0

    def __post_init__(self) -> None:
        self.new_controller()
        self.new_supervisor()

    def fold(self) -> ScaleState:
        state = ScaleState()
        for event in self.log:
            state.apply(event)
        return state

    def new_controller(self) -> None:
        self.num_controllers += 1
        self.controller = self.fold()

    def new_supervisor(self) -> None:
        """Its workers end with the one before."""
        self.supervisor = self.fold()
        self.alive.clear()

    def write(self, event: Event) -> None:
        self.log.append(event)
        self.controller.apply(event)
        self.supervisor.apply(event)

    def ask(self, **asked: object) -> ScaleRequest | None:
        found = admit(self.controller, self.bounds, ScaleCommand(**asked), now=self.now * SECOND)  # type: ignore[arg-type]
        if found.request is not None and found.is_new:
            self.write(found.request.open_command(reason=found.text))
        return found.request

    def cancel(self, request_id: str) -> None:
        request = require_cancellable(self.controller.requests[request_id])
        self.write(
            request.status_command(Status.REMOVING, now=self.now * SECOND, outcome=Status.CANCELLED)
        )

    def turn(self) -> None:
        self.now += 1
        for worker in list(self.supervisor.workers.values()):
            self.supervise(worker.worker_id, worker.desired_state)
        for worker_id, kind in self.alive.items():
            self.send_heartbeat(worker_id, kind)
        for step in decide(self.controller, self.bounds, now=self.now * SECOND):
            self.write(step)
            self.controller.apply(step)  # applied a second time

    def supervise(self, worker_id: str, standing: DesiredState) -> None:
        if standing is DesiredState.RUNNING and worker_id not in self.alive:
            self.alive[worker_id] = self.behaviour.pop(0) if self.behaviour else "well"
            self.ages[worker_id] = 0
        elif standing is DesiredState.RUNNING and self.alive[worker_id] == "breaks":
            self.leave(worker_id, ExitReason.FAILED)
        elif standing is DesiredState.LEAVING:
            self.leave(
                worker_id, ExitReason.DRAINED if worker_id in self.alive else ExitReason.ABSENT
            )

    def leave(self, worker_id: str, departure: ExitReason) -> None:
        self.alive.pop(worker_id, None)
        self.write(self.supervisor.workers[worker_id].exit_command(departure, "as commanded"))

    def send_heartbeat(self, worker_id: str, kind: str) -> None:
        self.ages[worker_id] += 1
        state = (
            WorkerState.STARTING
            if self.ages[worker_id] < 3 or kind == "hangs"
            else WorkerState.IDLE
        )
        said: WorkerHeartbeat = make_heartbeat(worker_id, at_seconds=self.now, state=state)
        self.write(
            replace(said, policy_version=-1 if kind == "stale" or self.ages[worker_id] < 5 else 7)
        )

    def run(
        self,
        turns: int,
        *,
        kills: frozenset[int] = frozenset(),
        crashes: frozenset[int] = frozenset(),
    ) -> None:
        for number in range(turns):
            if number in kills:
                self.new_controller()
            if number in crashes:
                self.new_supervisor()
            self.turn()

    def status(self, request: ScaleRequest | None) -> Status:
        assert request is not None
        return self.fold().requests[request.request_id].status


def steps(world: World, request: ScaleRequest) -> list[Status]:
    """Return the statuses that a request has on the log, one after the other."""
    commands = [
        event
        for event in world.log
        if isinstance(event, RunCommanded) and event.arguments.get("request") == request.request_id
    ]
    return [Status(event.arguments["status"]) for event in commands if "status" in event.arguments]


KILLS = st.frozensets(st.integers(0, 60), max_size=20)


@settings(max_examples=30)
@given(kills=KILLS, crashes=st.frozensets(st.integers(0, 60), max_size=3), target=st.integers(2, 6))
def test_scaling_completes_although_controllers_and_workers_are_killed(
    kills: frozenset[int], crashes: frozenset[int], target: int
) -> None:
    world = World()
    world.controller.policy_version = 7
    out = world.ask(kind=Kind.OUT, target=target)
    assert out is not None
    world.run(80, kills=kills, crashes=crashes)
    assert world.status(out) is Status.ACTIVE
    assert set(world.alive) == {f"rollout-{index}" for index in range(1, target)}
    assert steps(world, out) == [
        Status.CREATING,
        Status.HEALTH_CHECKING,
        Status.WEIGHT_SYNCING,
        Status.READY,
        Status.ACTIVE,
    ]
    back = world.ask(kind=Kind.IN, target=1)
    assert back is not None
    world.run(80, kills=kills, crashes=crashes)
    assert world.status(back) is Status.COMPLETED
    assert (world.alive, world.fold().workers) == ({}, {})


def test_scaling_survives_controller_crashes_in_every_status() -> None:
    """Each status is killed in once, one step at a time; nothing is skipped, and nothing is done
    twice."""
    world = World()
    seen: set[tuple[Kind, Status]] = set()
    for asked in (ScaleCommand(kind=Kind.OUT, target=3), ScaleCommand(kind=Kind.IN, target=1)):
        request = world.ask(kind=asked.kind, target=asked.target)
        assert request is not None
        while (status := world.status(request)) not in OVER[asked.kind]:
            seen.add((asked.kind, status))
            world.new_controller()
            world.turn()
        assert (
            len(steps(world, request))
            == len(set(steps(world, request)))
            == len(STAGES[asked.kind]) - (2 if asked.kind is Kind.OUT else 1)
        )
    assert {status for kind, status in seen if kind is Kind.OUT} == {
        Status.PENDING,
        Status.CREATING,
        Status.HEALTH_CHECKING,
        Status.WEIGHT_SYNCING,
        Status.READY,
    }
    assert {status for kind, status in seen if kind is Kind.IN} == {
        Status.PENDING,
        Status.DRAINING,
        Status.REMOVING,
    }


@settings(max_examples=40)
@given(
    behaviour=st.lists(st.sampled_from(["well", "hangs", "breaks"]), min_size=4, max_size=4),
    keeps=st.booleans(),
    kills=KILLS,
)
def test_scaling_request_whose_workers_fail_to_start_ends_and_removes_them(
    behaviour: list[str], keeps: bool, kills: frozenset[int]
) -> None:
    world = World(replace(in_time(20), keeps_partial=keeps), list(behaviour))
    request = world.ask(kind=Kind.OUT, target=5)
    assert request is not None
    world.run(120, kills=kills)
    num_well = behaviour.count("well")
    whole = num_well == len(behaviour)
    expected = Status.ACTIVE if whole else Status.PARTIAL if keeps and num_well else Status.FAILED
    ended = world.fold().requests[request.request_id]
    assert (ended.status, bool(ended.error)) == (expected, not whole)
    assert list(world.alive.values()) == ["well"] * (num_well if whole or keeps else 0)
    assert set(world.fold().workers) == set(world.alive)


@settings(max_examples=30)
@given(at=st.integers(0, 12), kills=KILLS)
def test_scaling_request_cancelled_at_any_time_leaves_no_workers(
    at: int, kills: frozenset[int]
) -> None:
    world = World(behaviour=["hangs"])
    request = world.ask(kind=Kind.OUT, target=3)
    assert request is not None
    world.run(at, kills=kills)
    world.cancel(request.request_id)
    world.run(60, kills=kills)
    assert world.status(request) is Status.CANCELLED
    assert (world.alive, world.fold().workers) == ({}, {})
    again = world.ask(kind=Kind.OUT, target=3)
    assert again is not None
    assert set(again.workers).isdisjoint(request.workers), "a worker's name is used once"


def test_worker_with_old_weights_does_not_count_as_serving() -> None:
    world = World(behaviour=["stale"])
    world.controller.policy_version = 7
    request = world.ask(kind=Kind.OUT, target=2)
    world.run(30)
    assert world.status(request) is Status.WEIGHT_SYNCING


def test_unreported_worker_exit_does_not_block_the_next_scaling_request() -> None:
    world = World()
    request = world.ask(kind=Kind.OUT, target=2)
    world.run(20)
    back = world.ask(kind=Kind.IN, target=1)
    world.supervise = lambda *_: None  # type: ignore[method-assign]
    world.run(40)
    assert world.status(back) in (Status.DRAINING, Status.REMOVING)
    world.run(40)
    assert (world.status(request), world.status(back)) == (Status.ACTIVE, Status.FAILED)
    assert "no exit was reported of rollout-1" in world.fold().requests[back.request_id].error  # type: ignore[union-attr]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from([*Kind]), st.integers(1, 6), st.integers(0, 8), st.booleans()),
        max_size=12,
    )
)
def test_all_readers_agree_and_at_most_one_scaling_request_is_open(
    calls: list[tuple[Kind, int, int, bool]],
) -> None:
    world = World(behaviour=["well", "breaks", "hangs"], bounds=in_time(15))
    for kind, target, turns, is_killed in calls:
        try:
            world.ask(kind=kind, target=target)
        except ConflictError:
            assert world.controller.open_request("default") is not None
        world.run(turns, kills=frozenset({0}) if is_killed else frozenset())
        assert sum(request.is_open for request in world.controller.requests.values()) <= 1
    one, two, three = (
        (state.requests, state.workers)
        for state in (world.fold(), world.controller, world.supervisor)
    )
    assert one == two == three
    world.run(120)
    assert [
        request.request_id for request in world.fold().requests.values() if request.is_open
    ] == []
    assert set(world.fold().workers) == set(world.alive)
