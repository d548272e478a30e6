"""Scaling requests over generated runs: whichever process dies, and whenever, each request ends by
the rules, and a rolled-back request leaves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.controller.scaling_admission import (
    ConflictError,
    admit,
    cancel,
)
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_decisions import decide
from relax_events.events.parts import WorkerState
from relax_events.events.types import Event, RunCommanded, WorkerHeartbeat
from relax_events.projections.scale_requests import Kind, ScaleCommand, ScaleRequest, Status
from relax_events.projections.scaling import ElasticWorker, ExitReason, ScaleState
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

    def open_requests(self) -> list[ScaleRequest]:
        requests = self.fold().requests.values()
        return [request for request in requests if request.is_open(now=self.now * SECOND)]

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
            self.write(found.request.to_record(reason=found.text))
        return found.request

    def cancel(self, request_id: str) -> None:
        request = self.controller.requests[request_id]
        self.write(cancel(self.controller, self.bounds, request, now=self.now * SECOND))

    def turn(self) -> None:
        self.now += 1
        for worker in list(self.supervisor.workers.values()):
            self.supervise(worker)
        for worker_id, kind in self.alive.items():
            self.send_heartbeat(worker_id, kind)
        for step in decide(self.controller, self.bounds, now=self.now * SECOND):
            self.write(step)
            self.controller.apply(step)  # applied a second time

    def supervise(self, worker: ElasticWorker) -> None:
        worker_id = worker.worker_id
        if worker.is_leaving:
            self.leave(
                worker_id, ExitReason.DRAINED if worker_id in self.alive else ExitReason.ABSENT
            )
        elif worker_id not in self.alive:
            self.alive[worker_id] = self.behaviour.pop(0) if self.behaviour else "well"
            self.ages[worker_id] = 0
        elif self.alive[worker_id] == "breaks":
            self.leave(worker_id, ExitReason.FAILED)

    def leave(self, worker_id: str, departure: ExitReason) -> None:
        self.alive.pop(worker_id, None)
        exit_command = self.supervisor.workers[worker_id].exit_command(departure, "as commanded")
        self.write(replace(exit_command, commanded_at=self.now * SECOND))

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
        state = self.fold()
        return state.status(state.requests[request.request_id], now=self.now * SECOND)


def outcomes(world: World, request: ScaleRequest) -> list[str]:
    """Return the outcome of a request, as often as the log has it."""
    records = [
        ScaleRequest.from_record(event) for event in world.log if isinstance(event, RunCommanded)
    ]
    return [
        str(record.outcome)
        for record in records
        if record is not None and record.request_id == request.request_id and record.outcome
    ]


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
    assert outcomes(world, out) == ["ACTIVE"]
    back = world.ask(kind=Kind.IN, target=1)
    assert back is not None
    world.run(80, kills=kills, crashes=crashes)
    assert world.status(back) is Status.COMPLETED
    assert (world.alive, world.fold().workers) == ({}, {})


def test_scaling_survives_controller_crashes_in_every_status() -> None:
    """A controller is killed in every turn; nothing is skipped, and nothing is done twice."""
    world = World()
    world.controller.policy_version = 7
    seen = []
    for asked in (ScaleCommand(kind=Kind.OUT, target=3), ScaleCommand(kind=Kind.IN, target=1)):
        request = world.ask(kind=asked.kind, target=asked.target)
        assert request is not None
        while world.controller.open_request("rollout", now=world.now * SECOND) is not None:
            seen.append(world.status(request))
            world.new_controller()
            world.turn()
        seen.append(world.status(request))
        assert outcomes(world, request) == ["ACTIVE"] * (asked.kind is Kind.OUT)
    assert list(dict.fromkeys(seen)) == [
        Status.PENDING,
        Status.HEALTH_CHECKING,
        Status.WEIGHT_SYNCING,
        Status.ACTIVE,
        Status.COMPLETED,
    ]


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
    assert (world.status(request), bool(ended.error)) == (expected, not whole)
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
    assert world.status(back) in (Status.PENDING, Status.DRAINING, Status.REMOVING)
    world.run(40)
    assert (world.status(request), world.status(back)) == (Status.ACTIVE, Status.FAILED)
    assert back is not None
    error = world.fold().requests[back.request_id].describe_error(now=world.now * SECOND)
    assert error == "no exit was reported in time of rollout-1"


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
            assert world.controller.open_request("rollout", now=world.now * SECOND) is not None
        world.run(turns, kills=frozenset({0}) if is_killed else frozenset())
        assert len(world.open_requests()) <= 1
    one, two, three = (
        (state.requests, state.workers)
        for state in (world.fold(), world.controller, world.supervisor)
    )
    assert one == two == three
    world.run(120)
    assert world.open_requests() == []
    assert set(world.fold().workers) == set(world.alive)
