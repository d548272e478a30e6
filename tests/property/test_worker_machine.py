"""The real work loops under every interleaving and crash that hypothesis thinks of: the ledger's promises hold at every moment,
and when the faults stop, every step gets its exact batch.

The machine must be able to fail: each mutation below breaks one of the mechanisms that delivery rests on, and is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from simulated_run import SimulatedRun

from relax_events.broker.records import OutRecord
from relax_events.broker.transactions import TransactionalWriter
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.pipeline.join import GroupJoin
from relax_events.pipeline.map_role import MapRole, next_offsets
from relax_events.topics import TopicPlan
from relax_events.training import assembly
from relax_events.training.assembly import DecidedGroups
from relax_events.training.commit import StepCommitter
from workers.prompter import PrompterLoop

ROLES = ("trainer", "prompter", "reward", "advantage")
SHARED = ("reward", "advantage")
NAMES = [f"{role}-0" for role in ROLES] + [f"{role}-1" for role in SHARED]
MAX_ROUNDS = 150
names = st.sampled_from(NAMES)
indices = st.integers(0, 50)


class WorkerMachine(RuleBasedStateMachine):
    """Rules are faults and turns; what they are given picks among what is there."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = pytest.MonkeyPatch()
        self.run = SimulatedRun(self._patches)
        self.zombies: list[Any] = []

    @initialize()
    def start_roles(self) -> None:
        for role in ROLES:
            self.run.start(role)
        while not self._due():
            self._everyone_takes_a_turn()
            self.run.look()

    @rule(name=names, turns=st.integers(1, 8))
    def work(self, name: str, turns: int) -> None:
        """Let a process go on for some rounds; a dead one is started again."""
        for _ in range(turns):
            self._alive(name).turn()

    @rule(turns=st.integers(1, 12), num_rolled_out=st.integers(0, 4))
    def everyone_works(self, turns: int, num_rolled_out: int) -> None:
        """The run goes its usual way for a while."""
        self._serve(num_rolled_out)
        for _ in range(turns):
            self._everyone_takes_a_turn()

    @rule(pick=indices, lag=st.integers(0, 3), is_settled=st.booleans())
    def roll_out(self, pick: int, lag: int, is_settled: bool) -> None:
        """An engine finishes a prompt group, perhaps on weights of long ago; a lease that it can't settle comes back."""
        due = self._due()
        if due:
            offset, issued = due[pick % len(due)]
            self.run.roll_out(issued, policy_version=max(self.run.published_version - lag, 0))
            if is_settled:
                del self.run.open_leases[offset]

    @rule(pick=indices)
    def engine_dies_halfway(self, pick: int) -> None:
        due = self._due()
        if due:
            self.run.roll_out(due[pick % len(due)][1], policy_version=self.run.published_version, num_samples=1)

    @rule(name=names, passes=st.integers(1, 30), num_rolled_out=st.integers(0, 4), turns_of_others=st.integers(0, 4))
    def crash_soon(self, name: str, passes: int, num_rolled_out: int, turns_of_others: int) -> None:
        """There is work, and the process dies at one of its next broker calls, before or after it took effect."""
        process = self._alive(name)
        self._serve(num_rolled_out)
        for _ in range(turns_of_others):
            self._everyone_takes_a_turn(but=process)
        process.process.passes_left = passes
        while process.is_running:
            process.turn()

    @rule(name=names)
    def sessions_lapse(self, name: str) -> None:
        """A process was silent for longer than its session: its partitions go to others, and its commits are refused."""
        self.run.kafka.lapse(self._alive(name).process)

    @rule(name=names)
    def delivery_report_is_lost(self, name: str) -> None:
        self._alive(name).process.lost_report = True

    @rule(name=names)
    def offset_commit_is_lost(self, name: str) -> None:
        self._alive(name).process.lost_commit = True

    @rule(how=st.sampled_from(["done", "not done"]))
    def transaction_is_unsure(self, how: str) -> None:
        self._alive("trainer-0").process.unsure_commit = how

    @rule(role=st.sampled_from(SHARED))
    def second_member_drains(self, role: str) -> None:
        process = self.run.processes.get(f"{role}-1")
        if process is not None and process.is_running and process.worker is not None:
            process.worker.drain.start()

    @rule()
    def second_trainer_takes_over(self) -> None:
        """The first goes on as a zombie."""
        self.zombies.append(self._alive("trainer-0"))
        self.run.start("trainer")

    @precondition(lambda self: self.zombies)
    @rule(pick=indices, turns=st.integers(1, 8))
    def zombie_goes_on(self, pick: int, turns: int) -> None:
        zombie = self.zombies[pick % len(self.zombies)]
        for _ in range(turns):
            if zombie.is_running:
                zombie.turn()

    @precondition(lambda self: self.run.ledger.issued)
    @rule(pick=indices, entity=st.sampled_from(["rollout.samples", "reward.scores", "advantage.samples"]))
    def poison(self, pick: int, entity: str) -> None:
        """Somebody writes what nobody can read, under a prompt group's key."""
        self._write(entity, self._pick_issued(pick), self.run.published_version, b"\xc3\x01poison")

    @precondition(lambda self: self.run.ledger.rolled_out)
    @rule(pick=indices, entity=st.sampled_from(["rollout.samples", "reward.scores", "advantage.samples"]))
    def record_is_doubled(self, pick: int, entity: str) -> None:
        entries = [entry for place in self.run.places(entity) for entry in self.run.kafka.visible(place, 0)]
        if entries:
            entry = entries[pick % len(entries)]
            self.run.kafka.append(entry.place, key=entry.key, value=entry.stored, headers=entry.carried)

    @invariant()
    def ledger_is_clean(self) -> None:
        self.run.look()
        assert self.run.ledger.problems() == []
        assert self.run.ledger.figures()["staleness_max"] <= self.run.config.run.max_staleness

    @invariant()
    def offsets_never_pass_a_sample_without_its_score(self) -> None:
        scored = {event.sample_id for event in self.run.events("reward.scores") if isinstance(event, SampleScored)}
        committed = self.run.kafka.committed.get(self.run.plan.consumer_group("reward"), {})
        oldest = self.run.published_version - self.run.config.run.max_staleness
        for place in self.run.places("rollout.samples"):
            for entry in self.run.kafka.visible(place, 0):
                sample = self.run.decoded(entry.stored)
                if entry.offset < committed.get(place, 0) and isinstance(sample, SampleRolledOut) and sample.policy_version >= oldest:
                    assert sample.sample_id in scored

    def teardown(self) -> None:
        """End the faults; now every step must get its batch."""
        try:
            for process in [*self.run.processes.values(), *self.zombies]:
                process.process.heal()
            self._finish()
        finally:
            for zombie in self.zombies:
                zombie.kill()
            self.run.close()
            self._patches.undo()

    def _finish(self) -> None:
        run, wanted = self.run, self.run.config.run
        for process in self.run.processes.values():
            if not process.is_running:
                run.kafka.lapse(process.process)
        for _ in range(MAX_ROUNDS):
            if run.num_steps == wanted.num_steps:
                break
            self._serve(len(run.open_leases))
            self._everyone_takes_a_turn()
            self.ledger_is_clean()
        assert run.num_steps == wanted.num_steps, f"stuck at step {run.num_steps} with {run.ledger.figures()}"
        assert len(run.ledger.trained_groups) == wanted.num_steps * wanted.groups_per_step
        assert len(run.ledger.trained) == wanted.num_steps * wanted.groups_per_step * wanted.samples_per_prompt
        assert run.ledger.figures()["outcomes"]["in_flight"] == 0

    def _serve(self, num_rolled_out: int) -> None:
        """Let engines on the newest version finish so many prompt groups, and settle their leases."""
        for offset, issued in self._due()[:num_rolled_out]:
            self.run.roll_out(issued, policy_version=self.run.published_version)
            del self.run.open_leases[offset]

    def _everyone_takes_a_turn(self, *, but: Any = None) -> None:
        for process in [*(self._alive(name) for name in NAMES[:4]), *self.run.processes.values(), *self.zombies]:
            if process.is_running and process is not but:
                process.turn()

    def _alive(self, name: str) -> Any:
        """Return a process, started again when it has ended."""
        process = self.run.processes.get(name)
        if process is None or not process.is_running:
            if process is not None:
                self.run.kafka.lapse(process.process)
            role, _, index = name.rpartition("-")
            self.run.start(role, int(index))
        return self.run.processes[name]

    def _due(self) -> list[tuple[int, Any]]:
        """Return the leases that an engine could serve now."""
        published = self.run.published_version
        return [(offset, issued) for offset, issued in self.run.open_leases.items() if 0 <= issued.required_policy_version <= published]

    def _pick_issued(self, pick: int) -> str:
        issued = sorted(self.run.ledger.issued)
        return issued[pick % len(issued)]

    def _write(self, entity: str, prompt_group_id: str, policy_version: int, value: bytes) -> None:
        place = (self.run.plan.topic(entity), self.run.plan.partition(prompt_group_id, max(policy_version, 0)))
        headers = [("policy-version", str(policy_version).encode())]
        self.run.kafka.append(place, key=prompt_group_id.encode(), value=value, headers=headers)


class OverlapMachine(WorkerMachine):
    """The same, of a trainer that is ahead of the log by a step. (A fixed exploration follows from its machine's text, so that stays as it is.)"""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimulatedRun, "overlap", True)
            super().__init__()


def explore(*, max_examples: int, is_fixed: bool = True, machine: type[WorkerMachine] = WorkerMachine) -> None:
    """Run the machine; what it finds is shrunk only when the examples are new ones."""
    chosen = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=is_fixed,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] if is_fixed else [Phase.generate, Phase.shrink],
    )
    run_state_machine_as_test(machine, settings=chosen)


def test_promises_hold_under_every_interleaving_and_crash() -> None:
    explore(max_examples=25)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [WorkerMachine, OverlapMachine])
def test_promises_hold_under_many_more(machine: type[WorkerMachine]) -> None:
    explore(max_examples=500, is_fixed=False, machine=machine)


def commit_before_output(role: MapRole, records: list[Any]) -> None:
    """Commit the input offsets, then write the output."""
    role._consumer.commit(next_offsets(records))
    fit = [(record, sample) for record in records if (sample := role._sample(record)) is not None]
    for out in role._outputs(fit):
        role._worker.producer.send(out)
    role._worker.producer.flush()


def newest_positions(join: GroupJoin) -> list[TopicOffset]:
    """Return how far was read, whatever is still open."""
    return [TopicOffset(topic, partition, position) for (topic, partition), position in join._positions.items()]


def one_transaction_each(whole: Callable[..., None]) -> Callable[..., None]:
    """Return a commit that makes records real one by one."""

    def commit(writer: TransactionalWriter, records: Sequence[OutRecord], **more: Any) -> None:
        for record in records:
            whole(writer, [record], **more)

    return commit


unique = iter(range(1_000_000_000))
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "offsets are committed before the output": (MapRole, "_process", commit_before_output),
    "offsets pass open prompt groups": (GroupJoin, "low_watermarks", newest_positions),
    "the trainer forgets what it decided": (DecidedGroups, "__contains__", lambda *_: False),
    "the window is not looked at": (assembly, "is_expired", lambda *_, **__: False),
    "an unsure commit is made again": (StepCommitter, "_is_committed", lambda *_: False),
    "records become real one by one": (TransactionalWriter, "commit", one_transaction_each(TransactionalWriter.commit)),
    "every trainer has an id of its own": (TopicPlan, "transactional_id", lambda *_: f"trainer-{next(unique)}"),
    "what ended untrained is not issued again": (PrompterLoop, "_replace", lambda *_: None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_machine_finds_a_broken_mechanism(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    with pytest.raises(AssertionError):
        explore(max_examples=60)
