"""The health manager over generated runs: healthy workers are left alone, and unhealthy ones get a
bounded number of restarts, whatever happens to the controller.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.controller.health import HealthLimits, decide, find_symptoms
from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import Event, RunCommanded, WorkerHeartbeat
from relax_events.projections.health import HealthState, Intervention, RecoveryLevel, Symptom
from tests.unit.run_events import make_heartbeat as make_heartbeat
from tests.unit.run_events import run_config, train_step

TURN = 10
HUNG, STUCK, CALL = 60, 120, 240
LIMITS = replace(
    HealthLimits.from_config(run_config(num_steps=10**6)),
    heartbeat_timeout=HUNG * 10**6,
    progress_timeout=STUCK * 10**6,
)
ROLES = sorted(LIMITS.pipeline)
WELL = 10**9


def inside(
    heartbeat: WorkerHeartbeat, activity: str, *, since_seconds: float, deadline_seconds: float
) -> WorkerHeartbeat:
    """Send a heartbeat from inside a long call."""
    since = int(since_seconds * 10**6)
    return replace(
        heartbeat,
        activity=activity,
        activity_since=since,
        activity_deadline_at=since + int(deadline_seconds * 10**6),
    )


@dataclass
class Patient:
    """A worker that falls ill again some turns after each of its starts, until it has been started
    often enough."""

    worker_id: str
    kind: str = "silent"
    num_starts_needed: int = 0
    incubation: int = 1
    num_starts: int = 0
    age: int = -2

    @property
    def is_ill(self) -> bool:
        return self.num_starts < self.num_starts_needed and self.age >= self.incubation

    def turn(self, now: int) -> WorkerHeartbeat | None:
        self.age += 1
        if not self.is_ill:
            return make_heartbeat(self.worker_id, at_seconds=now)
        if self.kind == "silent":
            return None
        since = now - (self.age - self.incubation) * TURN
        heartbeat = make_heartbeat(self.worker_id, at_seconds=now)
        if self.kind == "overdue":
            return inside(heartbeat, "publish weights", since_seconds=since, deadline_seconds=CALL)
        return replace(heartbeat, busy_since=since * 10**6)

    def start_again(self) -> None:
        self.num_starts, self.age = self.num_starts + 1, 0


@dataclass
class World:
    """Workers, a log, and a controller that may be killed: a new one knows what the log holds, of
    every worker the newest heartbeat."""

    patients: list[Patient]
    commits: bool = True
    now: int = 1000
    commands: list[RunCommanded] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    heartbeats: dict[str, WorkerHeartbeat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.new_controller()

    def new_controller(self) -> None:
        self.state = HealthState(
            own_id="controller-0",
            gap_seconds=HUNG / 2,
            num_steps_kept=4,
            clock=lambda: self.now * 10**6,
        )
        for event in (*self.commands, *self.steps, *self.heartbeats.values()):
            self.observe(event)

    def observe(self, event: Event) -> None:
        self.state.apply(event)

    def turn(self, *, broker: bool = True) -> list[RunCommanded]:
        self.now += TURN
        if broker:
            said = [
                heartbeat
                for patient in self.patients
                if (heartbeat := patient.turn(self.now)) is not None
            ]
            for heard in (make_heartbeat("controller-0", at_seconds=self.now), *said):
                self.heartbeats[heard.worker_id] = heard
                self.observe(heard)
            if self.commits and {
                patient.worker_id.rpartition("-")[0]
                for patient in self.patients
                if not patient.is_ill
            } == set(ROLES):
                self.steps.append(train_step(len(self.steps), at_seconds=self.now))
                self.observe(self.steps[-1])
        given_now = decide(self.state, LIMITS, now=self.now * 10**6)
        for command in given_now:
            self.commands.append(command)
            self.observe(command)
            for patient in self.patients:
                if patient.worker_id == command.worker_id:
                    patient.start_again()
        return given_now

    def run(self, turns: int, *, kills: frozenset[int] = frozenset()) -> None:
        for number in range(turns):
            if number in kills:
                self.new_controller()
            if any(command.command is Command.STOP for command in self.turn()):
                return


def workers(**ill: Patient) -> list[Patient]:
    """Return one worker of each role; those given are ill."""
    return [ill.get(role.replace("-", "_"), Patient(f"{role}-0")) for role in ROLES]


def tally(world: World, tier: str, worker_id: str | None = None) -> int:
    return len(
        {
            c.commanded_at
            for c in world.commands
            if c.arguments.get("tier") == tier and worker_id in (None, c.worker_id)
        }
    )


@given(
    turns=st.lists(st.sampled_from(["turn", "turn", "turn", "outage", "kill"]), max_size=80),
    outage=st.integers(1, 40),
)
def test_healthy_workers_are_never_restarted_during_broker_or_controller_faults(
    turns: list[str], outage: int
) -> None:
    world = World(workers())
    for kind in turns:
        if kind == "kill":
            world.new_controller()
        for _ in range(outage if kind == "outage" else 1):
            world.turn(broker=kind != "outage")
    assert world.commands == []


@settings(max_examples=25)
@given(
    role=st.sampled_from(ROLES),
    kind=st.sampled_from(["silent", "stuck", "overdue"]),
    kills=st.frozensets(st.integers(0, 900), max_size=12),
)
def test_restart_limit_holds_although_controllers_are_killed(
    role: str, kind: str, kills: frozenset[int]
) -> None:
    patient = Patient(f"{role}-0", kind, num_starts_needed=WELL)
    world = World(workers(**{role.replace("-", "_"): patient}))
    world.run(4000, kills=kills)
    assert (tally(world, "restart"), tally(world, "restore")) == (
        LIMITS.max_restarts,
        LIMITS.max_pipeline_restarts,
    )
    stops = [command for command in world.commands if command.command is Command.STOP]
    assert [(stop.role, stop.worker_id, stop.succeeded) for stop in stops] == [(None, None, False)]
    assert stops[0].reason.startswith(f"{role}-0 has ")
    assert world.state.is_aborted


@settings(max_examples=25)
@given(
    num_starts=st.integers(1, LIMITS.max_restarts + LIMITS.max_pipeline_restarts),
    kills=st.frozensets(st.integers(0, 900), max_size=6),
)
def test_run_continues_once_a_restart_or_a_restore_succeeded(
    num_starts: int, kills: frozenset[int]
) -> None:
    world = World(workers(trainer=Patient("trainer-0", "stuck", num_starts_needed=num_starts)))
    world.run(1500, kills=kills)
    assert tally(world, "restart", "trainer-0") == min(num_starts, LIMITS.max_restarts)
    assert tally(world, "restore") == max(num_starts - LIMITS.max_restarts, 0)
    assert not world.state.is_over
    assert world.steps[-1].committed_at == world.now * 10**6  # type: ignore[union-attr]


@settings(max_examples=25)
@given(kind=st.sampled_from(["silent", "stuck"]), commits=st.booleans())
def test_unhealthy_worker_with_a_healthy_peer_never_restores_the_pipeline(
    kind: str, commits: bool
) -> None:
    sick = Patient("rollout-1", kind, num_starts_needed=WELL, incubation=2)
    world = World([*workers(), sick], commits=commits)
    world.run(3000)
    assert {(command.command, command.worker_id) for command in world.commands} == {
        (Command.RESTART, "rollout-1")
    }
    waits = [
        later.commanded_at - earlier.commanded_at for earlier, later in pairwise(world.commands)
    ]
    assert min(waits) >= HUNG * 10**6


def test_worker_in_a_long_call_is_restarted_only_after_the_calls_deadline() -> None:
    world = World(workers(trainer=Patient("trainer-0", "overdue", num_starts_needed=WELL)))
    world.run(3 + CALL // TURN)
    assert world.commands == [], "longer than hung and stuck allow"
    world.run(1)
    (command,) = world.commands
    assert (command.worker_id, command.arguments["symptom"]) == ("trainer-0", "overdue")
    assert (
        command.reason
        == "has been in one call for 250 s: publish weights, whose deadline passed 10 s ago"
    )


def test_restart_reason_names_the_call_of_a_worker_without_heartbeats() -> None:
    world = World(
        workers(trainer=Patient("trainer-0", num_starts_needed=WELL, incubation=0, age=-1))
    )
    world.observe(
        inside(
            make_heartbeat("trainer-0", at_seconds=world.now),
            "publish weights",
            since_seconds=world.now - 5,
            deadline_seconds=CALL,
        )
    )
    world.run(8)
    assert [command.reason for command in world.commands] == [
        "has sent no heartbeat for 70 s; in its last one it was in: publish weights for 5 s"
    ]


def test_starting_worker_may_take_longer_than_any_call_while_it_heartbeats() -> None:
    world = World(workers())
    starting = [
        replace(
            make_heartbeat("trainer-0", at_seconds=world.now + at, state=WorkerState.STARTING),
            pid=7,
        )
        for at in (0, 1, 2)
    ]
    for late in (False, True):
        for heartbeat in starting:
            since = world.now - (LIMITS.start_timeout / 10**6 + 1) * late
            world.observe(
                inside(
                    heartbeat,
                    "start",
                    since_seconds=since,
                    deadline_seconds=LIMITS.start_timeout / 10**6,
                )
            )
        assert find_symptoms(world.state, LIMITS, now=world.now * 10**6) == (
            {"trainer-0": "slow_start"} if late else {}
        )
    assert world.state.num_starts["trainer"] == 1, "one process, however many heartbeats it sends"


def test_wait_grows_between_failed_restarts() -> None:
    world = World(workers(advantage=Patient("advantage-0", num_starts_needed=WELL)))
    world.run(4000)
    times = sorted({command.commanded_at // 10**6 for command in world.commands})
    waits = [later - earlier for earlier, later in pairwise(times)]
    backoffs = [10, 20, 40, 10, 20, 40]
    assert all(wait >= HUNG + backoff for wait, backoff in zip(waits, backoffs, strict=True))
    assert len(times) == 7


def test_absent_worker_is_restarted_only_once_while_its_peer_works() -> None:
    gone = Patient("rollout-1", num_starts_needed=WELL, incubation=0)
    world = World([*workers(), Patient("rollout-1")])
    world.turn()
    world.patients[-1] = gone
    gone.start_again = lambda: None  # type: ignore[method-assign]
    world.run(500)
    assert [command.worker_id for command in world.commands] == ["rollout-1"]


def waiting(world: World) -> None:
    """Send heartbeats of all workers, each waiting for another."""
    for patient in world.patients:
        patient.turn = lambda now, name=patient.worker_id: WorkerHeartbeat(  # type: ignore[method-assign]
            worker_id=name, role=name.rpartition("-")[0], host="here", pid=1, state=WorkerState.IDLE,
            num_processed=7, num_in_flight=0, last_progress_at=0, sent_at=now * 10**6,
        )  # fmt: skip


def test_deadlocked_run_is_restored_and_finally_aborted() -> None:
    world = World(workers(), commits=False)
    waiting(world)
    world.run(STUCK // TURN)
    assert world.commands == []
    world.run(2)
    assert {command.worker_id for command in world.commands} == {f"{role}-0" for role in ROLES}
    assert {command.arguments["symptom"] for command in world.commands} == {"standstill"}
    world.run(2000)
    assert tally(world, "restore") == LIMITS.max_pipeline_restarts
    assert world.commands[-1].command is Command.STOP
    assert world.commands[-1].reason.startswith(
        "no worker has had any work for 120 s, and the goal is not reached; nor did 3 "
        "pipeline restarts (health.max_pipeline_restarts); see docs/"
    )


@pytest.mark.parametrize("symptom", [Symptom.STUCK, Symptom.SILENT])
def test_end_of_a_run_names_what_its_restarts_began_with(symptom: Symptom) -> None:
    world = World(workers(), commits=False)
    first = Intervention(1, RecoveryLevel.WORKER_RESTART, symptom, "reward-0", "reward")
    world.observe(first.to_command(reason="has sent no heartbeat for 70 s"))
    waiting(world)
    world.run(2200)
    assert world.commands[-1].command is Command.STOP
    assert (
        "(health.max_pipeline_restarts); it began when reward-0 has sent no heartbeat for 70 s; see"
        in world.commands[-1].reason
    )


def test_standstill_timeout_starts_again_after_a_long_train_step() -> None:
    world = World(workers(), commits=False)
    waiting(world)
    world.run(STUCK // TURN)
    world.observe(train_step(0, at_seconds=world.now))
    world.run(STUCK // TURN)
    assert world.commands == []
    world.run(2)
    assert tally(world, "restore") == 1


def test_paused_run_is_no_standstill_and_a_resumed_run_resets_the_counts() -> None:
    world = World(workers(), commits=False)
    world.observe(RunCommanded(command=Command.PAUSE, reason="maintenance"))
    waiting(world)
    world.run(500)
    assert world.commands == []
    world.observe(RunCommanded(command=Command.RESUME, reason="done"))
    world.run(2000)
    assert world.state.is_aborted
    resumed = RunCommanded(command=Command.RESUME, reason="relax run")
    world.commands = [resumed]
    world.observe(resumed)
    assert (world.state.interventions, world.state.is_over, world.state.is_aborted) == (
        [],
        False,
        False,
    )
    world.run(2)
    assert tally(world, "restore") == 1
