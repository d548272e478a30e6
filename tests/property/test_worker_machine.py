"""The real work loops under every interleaving and crash that hypothesis generates: the ledger's
promises hold at every moment, and when the faults stop, every step gets its exact batch.

The test must be able to fail: each mutation below breaks one of the mechanisms that delivery rests
on, and is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_samples import changed, ended, ready
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_run import SimulatedRun

from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.tensors import dense
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.roles.prompt_records import PromptQueue
from relax_events.runtime.control_view import ControlView
from relax_events.runtime.join import PromptGroupJoin
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.sample_input import next_offsets
from relax_events.staleness import IssuedGroup
from relax_events.topics import TopicPlan
from relax_events.topics.names import END_REQUESTS, TRAINER_INPUTS, TRAINING_SAMPLES
from relax_events.training.batch import assembly
from relax_events.training.batch.assembly import BatchAssembler, DedupWindow
from relax_events.training.commit import StepCommitter
from workers.prompter import PrompterLoop

ROLES = ("trainer", "prompter", "reward", "advantage")
SHARED, SINGLE = ("reward", "advantage"), ("trainer", "prompter")
NAMES = [f"{role}-0" for role in ROLES] + [f"{role}-1" for role in SHARED]
MAX_ROUNDS = 150
NUM_SAMPLES = 3
FORGED, FORGED_TOKENS = "forged", np.array([6, 6, 6, 6], np.int32)
CODEC = EventCodec()
names = st.sampled_from(NAMES)
indices = st.integers(0, 50)


class WorkerMachine(RuleBasedStateMachine):
    """Rules are faults and turns; what they are given picks among what is there."""

    run: SimulatedRun

    def __init__(self) -> None:
        super().__init__()
        self._patches = pytest.MonkeyPatch()
        self.zombies: list[Any] = []

    @initialize()
    def start_run(self) -> None:
        self._start(SimulatedRun(self._patches, samples_per_prompt=NUM_SAMPLES))

    def _start(self, run: SimulatedRun) -> None:
        self.run = run
        run.kafka.after_commit = self.offsets_pass_only_what_is_done
        for role in ROLES:
            self.run.start(role)
        while not self._due():
            self._everyone_takes_a_turn()
            self.run.update_ledger()

    @rule(name=names, turns=st.integers(1, 8))
    def work(self, name: str, turns: int) -> None:
        """Let a process continue for some rounds; a dead one is started again."""
        for _ in range(turns):
            self._alive(name).turn()

    @rule(turns=st.integers(1, 12), num_rolled_out=st.integers(0, 4))
    def everyone_works(self, turns: int, num_rolled_out: int) -> None:
        """The run proceeds without faults for a while."""
        self._serve(num_rolled_out)
        for _ in range(turns):
            self._everyone_takes_a_turn()

    @rule(
        pick=indices,
        lag=st.integers(0, 3),
        is_settled=st.booleans(),
        lost=st.frozensets(st.integers(0, NUM_SAMPLES - 1), max_size=NUM_SAMPLES - 1),
    )
    def roll_out(self, pick: int, lag: int, is_settled: bool, lost: frozenset[int]) -> None:
        """An engine finishes a prompt group, perhaps on stale weights, and loses some samples; a
        lease that it can't acknowledge is redelivered."""
        due = self._due()
        if due:
            offset, issued = due[pick % len(due)]
            version = max(self.run.published_version - lag, 0)
            self.run.roll_out(issued, policy_version=version, lost=lost)
            if is_settled:
                del self.run.open_leases[offset]

    @rule(pick=indices)
    def engine_dies_halfway(self, pick: int) -> None:
        due = self._due()
        if due:
            self.run.roll_out(
                due[pick % len(due)][1], policy_version=self.run.published_version, num_samples=1
            )

    @rule(
        name=names,
        passes=st.integers(1, 30),
        num_rolled_out=st.integers(0, 4),
        turns_of_others=st.integers(0, 4),
    )
    def crash_soon(self, name: str, passes: int, num_rolled_out: int, turns_of_others: int) -> None:
        """The process has work and dies at one of its next broker calls, before or after the call
        takes effect."""
        process = self._alive(name)
        self._serve(num_rolled_out)
        for _ in range(turns_of_others):
            self._everyone_takes_a_turn(but=process)
        process.process.passes_left = passes
        while process.is_running:
            process.turn()

    @rule(name=names)
    def sessions_lapse(self, name: str) -> None:
        """A process is silent for longer than its session timeout: its partitions are reassigned,
        and its commits are rejected."""
        self.run.kafka.lapse(self._alive(name).process)

    @rule(name=names)
    def delivery_report_is_lost(self, name: str) -> None:
        self._alive(name).process.lost_report = True

    @rule(name=names)
    def offset_commit_is_lost(self, name: str) -> None:
        self._alive(name).process.lost_commit = True

    @rule(
        role=st.sampled_from(SINGLE),
        how=st.sampled_from(["done", "not done"]),
        turns=st.integers(1, 12),
    )
    def transaction_is_unsure(self, role: str, how: str, turns: int) -> None:
        """There is work, and a process does not learn whether its next commit took effect."""
        self._alive(f"{role}-0").process.unsure_commit = how
        self.everyone_works(turns, num_rolled_out=4)

    @rule(role=st.sampled_from(SHARED))
    def second_member_drains(self, role: str) -> None:
        process = self.run.processes.get(f"{role}-1")
        if process is not None and process.is_running and process.worker is not None:
            process.worker.drain.start()

    @rule(role=st.sampled_from(SINGLE), turns=st.integers(0, 4))
    def second_one_takes_over(self, role: str, turns: int) -> None:
        """The first continues as a zombie."""
        self.zombies.append(self._alive(f"{role}-0"))
        self.run.start(role)
        for _ in range(turns):
            self.run.processes[f"{role}-0"].turn()

    @precondition(lambda self: self.zombies)
    @rule(pick=indices, turns=st.integers(1, 8))
    def zombie_continues(self, pick: int, turns: int) -> None:
        zombie = self.zombies[pick % len(self.zombies)]
        for _ in range(turns):
            if zombie.is_running:
                zombie.turn()

    @precondition(lambda self: self.run.ledger.issued)
    @rule(
        pick=indices, entity=st.sampled_from(["rollout.samples", "reward.scores", *TRAINER_INPUTS])
    )
    def poison(self, pick: int, entity: str) -> None:
        """An unknown producer writes undecodable bytes under a prompt group's key."""
        self._write(entity, self._pick_issued(pick), self.run.published_version, b"\xc3\x01poison")

    @rule(
        name=st.sampled_from(["", "absent", "000001-1", "9" * 400]),
        outcome=st.sampled_from(list(Outcome)),
        entity=st.sampled_from(TRAINER_INPUTS),
    )
    def unknown_id_is_ended(self, name: str, outcome: Outcome, entity: str) -> None:
        """An unknown producer requests the end of a prompt group that does not exist, or reports
        one as trained."""
        is_trained = outcome is Outcome.TRAINED
        event = (
            ended("000004-0001-7", outcome)
            if is_trained
            else replace(ended("000001-0000-0", outcome), prompt_group_id=name)
        )
        self._write(entity, "000000-0000-0", self.run.published_version, CODEC.encode(event))

    @precondition(lambda self: self.run.ledger.issued)
    @rule(pick=indices, outcome=st.sampled_from([Outcome.TRAINED, Outcome.FILTERED, None]))
    def other_role_says_what_only_the_neighbour_may(
        self, pick: int, outcome: Outcome | None
    ) -> None:
        """A role writes samples, or an outcome that it may not write, to the topic of its end
        requests."""
        name, version = self._pick_issued(pick), max(self.run.published_version, 0)
        samples = [
            ready(name, index, version=version, of=NUM_SAMPLES, tokens=FORGED_TOKENS)
            for index in range(NUM_SAMPLES)
        ]
        for event in samples if outcome is None else [ended(name, outcome, reason=FORGED)]:
            self._write(
                "prompt.end-requests", name, self.run.published_version, CODEC.encode(event)
            )

    @precondition(lambda self: self.run.ledger.issued)
    @rule(
        pick=indices,
        how=st.sampled_from(
            ["of one sample", "other slot", "other key", "other partition", "of tomorrow"]
        ),
    )
    def forged_sample_does_not_fit_the_issue(self, pick: int, how: str) -> None:
        """An unknown producer writes to the trainer's input before the valid samples, with ids or
        versions that were not issued."""
        name, version = self._pick_issued(pick), max(self.run.published_version, 0)
        changes = {
            "of one sample": {"samples_per_prompt": 1},
            "other slot": {"group_index": 77},
        }.get(how, {})
        for index in range(NUM_SAMPLES):
            event = ready(
                name, index, version=version, of=NUM_SAMPLES, tokens=FORGED_TOKENS, **changes
            )
            if how == "of tomorrow":
                event = changed(
                    event,
                    prompt_group_id="000900-0000-0",
                    sample_id=f"000900-0000-0/{index}",
                    train_step=900,
                    group_index=0,
                    attempt=0,
                )
            topic_partition = (
                self.run.plan.topic(TRAINING_SAMPLES),
                self.run.plan.partition(event.prompt_group_id, version),
            )
            if how == "other partition":
                topic_partition = (
                    topic_partition[0],
                    (topic_partition[1] + 1) % self.run.plan.num_sample_partitions,
                )
            key = (
                "000000-0000-0"
                if how == "other key" and name != "000000-0000-0"
                else event.prompt_group_id
            )
            if how != "other key" or key != name:
                self.run.kafka.append(
                    topic_partition,
                    key=key.encode(),
                    value=CODEC.encode(event),
                    headers=[("policy-version", str(version).encode())],
                )

    @precondition(lambda self: self.run.ledger.rolled_out)
    @rule(
        pick=indices, entity=st.sampled_from(["rollout.samples", "reward.scores", *TRAINER_INPUTS])
    )
    def record_is_doubled(self, pick: int, entity: str) -> None:
        entries = [
            entry
            for topic_partition in self.run.topic_partitions(entity)
            for entry in self.run.kafka.visible(topic_partition, 0)
        ]
        if entries:
            entry = entries[pick % len(entries)]
            self.run.kafka.append(
                entry.topic_partition, key=entry.key, value=entry.stored, headers=entry.carried
            )

    @invariant()
    def ledger_is_clean(self) -> None:
        self.run.update_ledger()
        assert self.run.ledger.problems() == []
        assert self.run.ledger.totals()["staleness_max"] <= self.run.config.run.max_staleness
        assert not any(
            end.reason == FORGED
            for end in self.run.events("control.prompt-group-outcomes")
            if isinstance(end, PromptGroupEnded)
        )

    @invariant()
    def prompt_groups_are_issued_once(self) -> None:
        ids = [
            issued.prompt_group_id
            for issued in self.run.events("prompt.groups")
            if isinstance(issued, PromptGroupIssued)
        ]
        assert len(set(ids)) == len(ids), f"issued twice: {sorted(ids)}"

    def offsets_pass_only_what_is_done(self) -> None:
        """Checked at every offset commit: a process that is killed at that moment reads all
        unfinished records again."""
        self.offsets_never_pass_a_sample_without_its_score()
        self.offsets_never_pass_a_sample_without_its_advantages()
        self.offsets_never_pass_a_prompt_group_without_its_end()

    def offsets_never_pass_a_sample_without_its_score(self) -> None:
        scored = {
            event.sample_id
            for event in self.run.events("reward.scores")
            if isinstance(event, SampleScored)
        }
        assert all(sample.sample_id in scored for sample in self._passed_by("reward"))

    def offsets_never_pass_a_sample_without_its_advantages(self) -> None:
        done = self._group_ids("advantage.samples") | self._group_ids(
            "control.prompt-group-outcomes"
        )
        assert all(sample.prompt_group_id in done for sample in self._passed_by("advantage"))

    def _passed_by(self, role: str) -> Iterator[SampleRolledOut]:
        """Yield the samples of the window that a role's committed offsets have passed. The window
        is that of the log now: a role may have read a version that the ledger has not read yet.
        """
        committed = self.run.kafka.committed.get(self.run.plan.consumer_group(role), {})
        versions = [
            event.policy_version
            for event in self.run.events("control.policy-versions")
            if isinstance(event, PolicyVersionPublished)
        ]
        oldest = max(versions, default=-1) - self.run.config.run.max_staleness
        for topic_partition in self.run.topic_partitions("rollout.samples"):
            for entry in self.run.kafka.visible(topic_partition, 0):
                for sample in self.run.decoded(entry.stored):
                    if (
                        entry.offset < committed.get(topic_partition, 0)
                        and isinstance(sample, SampleRolledOut)
                        and sample.policy_version >= oldest
                    ):
                        yield sample

    def _group_ids(self, entity: str) -> set[str]:
        return {
            event.prompt_group_id
            for event in self.run.events(entity)
            if isinstance(event, SampleReady | PromptGroupEnded)
        }

    def offsets_never_pass_a_prompt_group_without_its_end(self) -> None:
        ended = self._group_ids("control.prompt-group-outcomes")
        committed = self.run.kafka.committed.get(self.run.plan.consumer_group("trainer"), {})
        for topic_partition in [
            topic_partition
            for entity in TRAINER_INPUTS
            for topic_partition in self.run.topic_partitions(entity)
        ]:
            for entry in self.run.kafka.visible(topic_partition, 0):
                is_passed = entry.offset < committed.get(topic_partition, 0) and not any(
                    self._is_refused(topic_partition[0], event)
                    for event in self.run.decoded(entry.stored) or (None,)
                )
                assert not is_passed or (entry.key or b"").decode() in ended

    def _is_refused(self, topic: str, event: Event | None) -> bool:
        """Return whether an event on the trainer's input is one that its writer may not write, so
        that it ends nothing."""
        if isinstance(event, SampleReady) and np.array_equal(
            dense(event.tokens, what="tokens"), FORGED_TOKENS
        ):
            return True
        if event is None or topic != self.run.plan.topic(END_REQUESTS):
            return False
        return not isinstance(event, PromptGroupEnded) or event.outcome in (
            Outcome.TRAINED,
            Outcome.FILTERED,
        )

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
        assert run.num_steps == wanted.num_steps, (
            f"stuck at step {run.num_steps} with {run.ledger.totals()}"
        )
        assert len(run.ledger.trained_groups) == wanted.num_steps * wanted.prompts_per_step
        assert (
            len(run.ledger.trained)
            == wanted.num_steps * wanted.prompts_per_step * wanted.samples_per_prompt
        )
        slots = [IssuedGroup.parse(name).slot for name in run.ledger.trained_groups]
        trained = {
            step: max(slot.group_index for slot in slots if slot.train_step == step)
            for step in range(wanted.num_steps)
        }
        ended_ids = {
            event.prompt_group_id
            for event in run.events("control.prompt-group-outcomes")
            if isinstance(event, PromptGroupEnded)
        }
        for name in run.ledger.issued - ended_ids:
            slot = IssuedGroup.parse(name).slot
            assert slot.group_index > trained[slot.train_step], f"{name} is no spare"
        assert run.ledger.skipped == run.ledger.not_finite
        assert run.ledger.held == list(range(run.config.first_policy_step))
        assert run.ledger.totals()["updates_skipped"] == len(run.ledger.skipped)

    def _serve(self, num_rolled_out: int) -> None:
        """Let engines on the newest version finish so many prompt groups, and settle their
        leases."""
        for offset, issued in self._due()[:num_rolled_out]:
            lost = (issued.row % (2 * NUM_SAMPLES),)  # none in half of the prompt groups
            self.run.roll_out(issued, policy_version=self.run.published_version, lost=lost)
            del self.run.open_leases[offset]

    def _everyone_takes_a_turn(self, *, but: Any = None) -> None:
        for process in [
            *(self._alive(name) for name in NAMES[:4]),
            *self.run.processes.values(),
            *self.zombies,
        ]:
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
        return [
            (offset, issued)
            for offset, issued in self.run.open_leases.items()
            if 0 <= issued.required_policy_version <= published
        ]

    def _pick_issued(self, pick: int) -> str:
        issued = sorted(self.run.ledger.issued)
        return issued[pick % len(issued)]

    def _write(self, entity: str, prompt_group_id: str, policy_version: int, value: bytes) -> None:
        topic_partition = (
            self.run.plan.topic(entity),
            self.run.plan.partition(prompt_group_id, max(policy_version, 0)),
        )
        headers = [("policy-version", str(policy_version).encode())]
        self.run.kafka.append(
            topic_partition, key=prompt_group_id.encode(), value=value, headers=headers
        )


class OverlapMachine(WorkerMachine):
    """The same, of a trainer that is ahead of the log by a step, with samples of several steps
    ahead of the trainer."""

    @initialize(max_staleness=st.sampled_from([1, 3, 5]))
    def start_run(self, max_staleness: int) -> None:  # type: ignore[override]  # hypothesis fills it in
        self._start(
            SimulatedRun(
                self._patches,
                overlap=True,
                max_staleness=max_staleness,
                num_steps=8,
                samples_per_prompt=NUM_SAMPLES,
            )
        )


class WarmUpMachine(WorkerMachine):
    """The same, of a trainer whose policy makes no update while only a critic learns."""

    @initialize()
    def start_run(self) -> None:
        self._patches.setattr(RunConfig, "first_policy_step", 2)
        super().start_run()


def explore(
    *, max_examples: int, is_fixed: bool = True, machine: type[WorkerMachine] = WorkerMachine
) -> None:
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


@pytest.mark.parametrize("machine", [WorkerMachine, OverlapMachine, WarmUpMachine])
def test_guarantees_hold_under_random_interleavings_and_crashes(
    machine: type[WorkerMachine],
) -> None:
    explore(max_examples=25, machine=machine)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [WorkerMachine, OverlapMachine, WarmUpMachine])
def test_guarantees_hold_under_many_more_random_examples(machine: type[WorkerMachine]) -> None:
    explore(max_examples=200, is_fixed=False, machine=machine)


def commit_before_output(role: SampleLoop) -> None:
    """Commit the input offsets, then write the output."""
    records = list(role._input.fetched)
    role._input.fetched.clear()
    role._input._consumer.commit(next_offsets(records))
    decoded = [(record, sample) for record in records for sample in role._input.decode(record)]
    for out in role._outputs(decoded):
        role._worker.records.producer.send(out)
    role._worker.records.producer.flush()


def newest_positions(join: PromptGroupJoin) -> list[TopicOffset]:
    """Return the newest read positions, including open transactions."""
    return [
        TopicOffset(topic, partition, position)
        for (topic, partition), position in join._positions.items()
    ]


def one_transaction_each(whole: Callable[..., None]) -> Callable[..., None]:
    """Return a commit that makes records real one by one."""

    def commit(writer: TransactionalWriter, records: Sequence[ProducerRecord], **more: Any) -> None:
        for record in records:
            whole(writer, [record], **more)

    return commit


def newest_read(assembler: BatchAssembler) -> list[TopicOffset]:
    """Return the newest read positions, including undecided records."""
    return [
        TopicOffset(*topic_partition, position)
        for topic_partition, position in assembler._positions.items()
    ]


unique = iter(range(1_000_000_000))
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "offsets are committed before the output": (SampleLoop, "_process_part", commit_before_output),
    "offsets pass open prompt groups": (PromptGroupJoin, "pending_offsets", newest_positions),
    "offsets pass undecided prompt groups": (BatchAssembler, "consumed", newest_read),
    "the trainer forgets what it decided": (DedupWindow, "__contains__", lambda *_: False),
    "the window is not looked at": (assembly, "is_expired", lambda *_, **__: False),
    "an unsure commit is made again": (StepCommitter, "_is_committed", lambda *_: False),
    "records become real one by one": (
        TransactionalWriter,
        "commit",
        one_transaction_each(TransactionalWriter.commit),
    ),
    "every trainer has an id of its own": (
        TopicPlan,
        "transactional_id",
        lambda *_: f"trainer-{next(unique)}",
    ),
    "the prompter does not look": (PromptQueue, "look", lambda *_: []),
    "what ended untrained is not issued again": (
        PrompterLoop,
        "_choose_successors",
        lambda *_: None,
    ),
}

RARELY_FOUND = {"the window is not looked at"}
"""The explorations of these take minutes."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in RARELY_FOUND else name
        for name in MUTATIONS
    ],
)
def test_state_machine_detects_every_broken_mechanism(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    if (
        name == "the window is not looked at"
    ):  # by the role before the trainer either, which leaves next to nothing for it to expire
        monkeypatch.setattr(ControlView, "is_expired", lambda *_: False)
    with pytest.raises(AssertionError):
        explore_several()


def explore_several() -> None:
    """Run fixed explorations, each another one; most of them find what is broken at once."""
    for max_examples in (25, 26, 27, 60, 200):
        explore(max_examples=max_examples)
