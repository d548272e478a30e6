"""Recomputes a run from its records and takes no word of the trainer's for it.

Feed a `Ledger` every event with its place: in log order within a topic, between topics in any
order. It gathers facts of prompt groups and train steps and judges them when all of them are there.
`settle` says up to which version everything has been fed: what lies behind is judged, counted and
forgotten, so that memory grows with the window and not with the run. What is not settled yet is
judged whenever somebody asks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.projections.ledger_facts import Generated, GroupFacts, Ready, StepFacts, Trained
from relax_events.projections.ledger_findings import Finding, Findings, Rule
from relax_events.projections.purged_ranges import PurgedLog
from relax_events.staleness import IssuedGroup, is_guest
from relax_events.topics import TopicPlan
from relax_events.topics.contents import belongs_on
from relax_events.topics.partitions import num_slots
from relax_events.topics.plan import TRAINED_FROM, TRAINER_INPUTS

STRANGE, GUESTS = -1, -2
"""Stand for the train step of what is no prompt group id, and of what guests have issued."""
UNTRAINED = ("filtered", "expired", "failed")


@dataclass(slots=True)
class Sums:
    """What can be added up: of what is settled once, and of what is not whenever it is asked
    for.
    """

    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    unproven: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)

    def add(self, other: Sums) -> None:
        """Take over what another one has summed up."""
        self.counts.update(other.counts)
        self.staleness.update(other.staleness)
        self.unproven.update(other.unproven)
        self.findings.add_all(other.findings)


@dataclass(slots=True)
class Ledger:
    """The books of a run. See the module's docstring.

    Attributes:
        max_staleness: The bound, in policy versions.
        first_version: The version that the run began with.
        last_version: The version that is the run's goal, -1 where there is none.
        in_order: Whether a step trains only prompt groups issued for it or an earlier one.
        has_rewards: Whether every trained sample has a score on reward.scores.
        purged: What may be missing from the log; None where it has never been purged.
        of_replay: Whether the batches are those of a source: each step is compared with the
            source's, whose own ledger proves the rest.
    """

    max_staleness: int
    first_version: int = 0
    last_version: int = -1
    in_order: bool = True
    has_rewards: bool = True
    purged: PurgedLog | None = None
    of_replay: bool = False
    num_unreadable: int = 0
    _settled: Sums = field(default_factory=Sums)
    _groups: dict[int, dict[str, GroupFacts]] = field(default_factory=dict)
    _steps: dict[int, StepFacts] = field(default_factory=dict)
    _source: dict[int, StepFacts] = field(default_factory=dict)
    _closed_below: int = 0
    _closed: set[int] = field(default_factory=set)
    _next_step: int = field(init=False)
    _next_version: int = field(init=False)
    _num_steps: int = 0
    _newest_weights: tuple[int, bytes] = (-1, b"")
    _consumed: dict[tuple[str, int], int] = field(default_factory=dict)
    _passed_over: dict[str, tuple[int, str]] = field(default_factory=dict)
    _ended_guests: set[str] = field(default_factory=set)
    _damaged_groups: set[str] = field(default_factory=set)
    _damaged_places: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._next_step = self._next_version = self._closed_below = self.first_version

    @property
    def num_held(self) -> int:
        """How many prompt groups and train steps are kept in memory."""
        return sum(map(len, self._groups.values())) + len(self._steps)

    def note(self, event: Event, at: TopicOffset) -> None:
        """Enter an event.

        Args:
            event: Of any of the topics that the ledger reads; others leave no trace, nor does one
                on a topic that doesn't hold its kind.
            at: Its record's place.
        """
        if not belongs_on(TopicPlan.entity(at.topic), event):
            return
        if isinstance(event, PromptGroupIssued):
            self._note_issue(event)
        elif isinstance(event, SampleRolledOut | SampleScored | SampleReady):
            self._note_sample(event, at)
        elif isinstance(event, PromptGroupEnded):
            self._note_end(event, at)
        elif isinstance(event, PolicyVersionPublished):
            self._note_version(event, at)
        elif isinstance(event, TrainStepCommitted):
            self._note_step(event, at)

    def note_source(self, step: TrainStepCommitted) -> None:
        """Enter a step of the run that this one replays: its prompt groups are what is issued here,
        and were generated there.
        """
        self._source[step.train_step] = StepFacts.of(step)
        for sample in self._source[step.train_step].samples:
            if (group := self._group(sample.sample_id.rpartition("/")[0])) is not None:
                group.is_issued = True
                group.generated.setdefault(sample.sample_id, [])
                group.num_generated += 1

    def note_unreadable(self) -> None:
        """Enter a record that can't be decoded: it may be refused, it must not be trained."""
        self.num_unreadable += 1

    def note_damaged(self, at: TopicOffset, *, key: str) -> None:
        """Enter a record that fails its checksum: what it said of the prompt group that its key
        names can't be proved any more.
        """
        self.num_unreadable += 1
        self._damaged_groups.add(key)
        if TopicPlan.entity(at.topic) == TRAINED_FROM:
            self._damaged_places.add((at.partition, at.offset))

    def settle(self, below: int) -> None:
        """Take it that every event of versions and train steps below this one has been fed; judge
        them and forget what is over.
        """
        for step in sorted(
            step for step, facts in self._steps.items() if step < below and self._is_read(facts)
        ):
            self._settled.add(self._judge_step(self._steps.pop(step)))
            self._source.pop(step, None)
        kept = 2 * num_slots(self.max_staleness)
        unsettled = {
            sample.sample_id.rpartition("/")[0]
            for facts in self._steps.values()
            for sample in facts.samples
        }
        for step, groups in list(self._groups.items()):
            is_over = unsettled.isdisjoint(groups) and all(
                group.ends or not group.is_issued for group in groups.values()
            )
            if self.first_version <= step < below - kept and is_over:
                self._close(step)
        self._forget_guests(unsettled)
        if self.purged is not None:
            self.purged.forget_before(below - kept)

    def _is_read(self, step: StepFacts) -> bool:
        """Tell whether every record that a step names has come; one that lies elsewhere than it
        should comes later, or never.
        """
        return self.of_replay or all(
            (group := self._group(sample.sample_id.rpartition("/")[0])) is None
            or (sample.partition, sample.offset) in group.ready
            or self._is_gone(sample)
            for sample in step.samples
        )

    def _is_gone(self, sample: Trained) -> bool:
        place = (sample.partition, sample.offset)
        return place in self._damaged_places or self._had_offset(TRAINED_FROM, *place)

    def _forget_guests(self, unsettled: set[str]) -> None:
        """Count guests that have ended, one call after they did: their ids tell no time, and copies
        of their records come close together.
        """
        guests = self._groups.get(GUESTS, {})
        for name in [name for name in guests if name in self._ended_guests - unsettled]:
            self._settled.add(self._judge_group(guests.pop(name)))
        self._ended_guests = {name for name, group in guests.items() if group.ends}

    def _close(self, step: int) -> None:
        groups = self._groups.pop(step)
        for group in groups.values():
            self._settled.add(self._judge_group(group))
        self._settled.findings.add_all(self._judge_seats(groups))
        self._closed.add(step)
        while self._closed_below in self._closed:
            self._closed.remove(self._closed_below)
            self._closed_below += 1
        for row in [row for row, (carrier, _) in self._passed_over.items() if carrier == step]:
            self._settled.counts[f"passed over: {self._passed_over.pop(row)[1]}"] += 1

    def _group(self, group_id: str) -> GroupFacts | None:
        """Return the facts of a prompt group; None once it is over and forgotten."""
        try:
            seat = IssuedGroup.parse(group_id)
        except CorruptRecord:
            seat = None
        step = STRANGE if seat is None else GUESTS if is_guest(group_id) else seat.place.train_step
        if self.first_version <= step < self._closed_below or step in self._closed:
            return None
        groups = self._groups.setdefault(step, {})
        return groups.get(group_id) or groups.setdefault(group_id, GroupFacts(group_id, seat))

    def _note_issue(self, event: PromptGroupIssued) -> None:
        if (group := self._group(event.prompt_group_id)) is None:
            return
        group.is_issued, group.num_samples = True, event.samples_per_prompt
        for row, reason in event.passed_over.items():
            self._passed_over.setdefault(
                row, (STRANGE if group.seat is None else group.seat.place.train_step, reason)
            )

    def _note_sample(
        self, event: SampleRolledOut | SampleScored | SampleReady, at: TopicOffset
    ) -> None:
        group = self._group(event.prompt_group_id)
        if isinstance(event, SampleRolledOut):
            if group is None:
                self._settled.counts["regenerated"] += 1
                return
            copies = group.generated.setdefault(event.sample_id, [])
            group.num_generated += 1
            if (copy := Generated.of(event)) not in copies:
                copies.append(copy)
        elif group is not None and isinstance(event, SampleScored):
            if event.reward is not None and event.error is None:
                group.rewards.setdefault(event.sample_id, set()).add(
                    (event.generation_digest, event.reward)
                )
        elif group is not None and isinstance(event, SampleReady):
            group.ready[at.partition, at.offset] = Ready.of(event)
            group.newest_records[TRAINED_FROM, at.partition] = at.offset

    def _note_end(self, event: PromptGroupEnded, at: TopicOffset) -> None:
        group = self._group(event.prompt_group_id)
        if (
            entity := TopicPlan.entity(at.topic)
        ) in TRAINER_INPUTS:  # it only asks the trainer to end the prompt group
            if group is not None:
                group.newest_records[entity, at.partition] = at.offset
        elif group is None:
            self._settled.findings.add(
                Rule.ENDED_TWICE, f"{event.prompt_group_id}: {event.outcome} again at {_place(at)}"
            )
        else:
            group.ends.append(event)

    def _note_version(self, event: PolicyVersionPublished, at: TopicOffset) -> None:
        if event.policy_version != self._next_version:
            self._settled.findings.add(
                Rule.VERSIONS,
                (
                    f"{_place(at)} publishes {event.policy_version} where {self._next_version} "
                    "must come"
                ),
            )
        self._next_version = max(self._next_version, event.policy_version + 1)
        if self.purged is not None:
            self.purged.note(event)

    def _note_step(self, event: TrainStepCommitted, at: TopicOffset) -> None:
        step, found, where = event.train_step, self._settled.findings, _place(at)
        if step != self._next_step:
            found.add(Rule.STEPS, f"{where} commits {step} where {self._next_step} must come")
        self._num_steps += step >= self._next_step
        self._next_step = max(self._next_step, step + 1)
        if reason := _contradiction(event):
            found.add(Rule.BAD_STEP, f"{where}: {reason}")
        self._note_weights(event, where)
        if len({len(event.sample_ids), len(event.partitions), len(event.offsets)}) > 1:
            return
        facts = StepFacts.of(event)
        for sample in facts.samples:
            self._note_trained(sample, where)
        self._note_consumed(event, where)
        self._steps.setdefault(step, facts)

    def _note_weights(self, event: TrainStepCommitted, where: str) -> None:
        """Hold a step that skipped its update to the weights of the step before, where that one is
        on the log.
        """
        before, self._newest_weights = (
            self._newest_weights,
            (event.policy_version, event.weights_digest),
        )
        self._settled.counts["updates skipped"] += event.update_skipped
        if (
            event.update_skipped
            and before[0] == event.train_step
            and before[1] != event.weights_digest
        ):
            self._settled.findings.add(Rule.SKIPPED_MOVED, where)

    def _note_trained(self, sample: Trained, where: str) -> None:
        group = self._group(sample.sample_id.rpartition("/")[0])
        if group is None:
            self._settled.findings.add(
                Rule.TRAINED_TWICE,
                f"{sample.sample_id} again in train step {sample.train_step}, {where}",
            )
            self._settled.counts["trained twice"] += 1
            return
        is_again = sample.sample_id in group.trained_ids
        group.trained.append(sample)
        consumed = self._consumed.get((TRAINED_FROM, sample.partition), 0)
        if sample.offset < consumed and not (is_again or self.of_replay):
            what = f"{sample.sample_id} at offset {sample.offset} of partition {sample.partition}"
            self._settled.findings.add(
                Rule.BELOW, f"{what}, consumed up to {consumed} before {where}"
            )

    def _note_consumed(self, event: TrainStepCommitted, where: str) -> None:
        for position in event.consumed:
            place = (TopicPlan.entity(position.topic), position.partition)
            if position.offset < (before := self._consumed.get(place, 0)):
                what = f"{place[0]}[{position.partition}] from {before} to {position.offset}"
                self._settled.findings.add(Rule.WENT_BACK, f"{what} in {where}")
            self._consumed[place] = max(position.offset, before)

    def _judge_step(self, step: StepFacts) -> Sums:
        """Find the records of a step's samples, and count their staleness by the versions that drew
        their tokens.
        """
        sums, ages = Sums(), Counter[int]()
        if self.of_replay:
            self._compare_with_source(step, sums)
            return sums
        for sample in step.samples:
            group = self._group(sample.sample_id.rpartition("/")[0])
            if group is not None and (copy := self._proven(sample, group, sums)) is not None:
                age = step.train_step - copy.oldest
                ages[age] += 1
                where = (
                    f"{sample.sample_id} in train step {step.train_step}, generated by versions "
                    f"{copy.oldest} to {copy.newest}"
                )
                if age > self.max_staleness:
                    sums.findings.add(Rule.TOO_STALE, f"{where}, bound {self.max_staleness}")
                if copy.newest > step.train_step:
                    sums.findings.add(Rule.AHEAD, where)
        told = Counter({age: count for age, count in enumerate(step.told_counts) if count})
        is_whole = ages.total() == len(step.samples)
        sums.staleness = ages if is_whole else told
        if is_whole and ages != told:
            sums.findings.add(
                Rule.MISCOUNTED,
                (
                    f"train step {step.train_step}: {dict(sorted(told.items()))} where it is "
                    f"{dict(sorted(ages.items()))}"
                ),
            )
        return sums

    def _compare_with_source(self, step: StepFacts, sums: Sums) -> None:
        source = self._source.get(step.train_step)
        sums.staleness.update({age: count for age, count in enumerate(step.told_counts) if count})
        if source is None or (sorted(source.samples), source.told_counts) != (
            sorted(step.samples),
            step.told_counts,
        ):
            sums.findings.add(Rule.NOT_AS_SOURCE, f"train step {step.train_step}")

    def _proven(self, sample: Trained, group: GroupFacts, sums: Sums) -> Generated | None:
        """Return the generated copy of a trained sample that its record holds; what stands against
        it goes to the sums.
        """
        record = group.ready.get((sample.partition, sample.offset))
        where = (
            f"{sample.sample_id} of train step {sample.train_step} at "
            f"advantage.samples[{sample.partition}]@{sample.offset}"
        )
        if record is None or record.sample_id != sample.sample_id:
            if self._is_gone(sample):
                sums.unproven[
                    "the record of {} trained samples is the one that the train step names"
                ] += 1
                self._check_generated(sample, group, sums)
                return None
            sums.findings.add(Rule.OTHER_RECORD, where)
            return None
        self._check_reward(sample, record, group, sums)
        copies = group.generated.get(sample.sample_id, [])
        fitting = [copy for copy in copies if copy == record[1:6]]
        if not fitting and not self._may_lack(
            group, "rollout.samples", sample.partition, record.owner
        ):
            sums.findings.add(Rule.OTHER_TOKENS if copies else Rule.NEVER_GENERATED, where)
        elif not fitting:
            sums.unproven["{} trained samples were generated as they were trained"] += 1
        return fitting[0] if fitting else None

    def _check_generated(self, sample: Trained, group: GroupFacts, sums: Sums) -> None:
        """Look for any copy of a trained sample whose own record is gone."""
        may_lack = group.group_id in self._damaged_groups or self._had_offset(
            "rollout.samples", sample.partition, 0
        )
        if not group.generated.get(sample.sample_id) and not may_lack:
            sums.findings.add(
                Rule.NEVER_GENERATED, f"{sample.sample_id} of train step {sample.train_step}"
            )

    def _check_reward(self, sample: Trained, record: Ready, group: GroupFacts, sums: Sums) -> None:
        rewards = group.rewards.get(sample.sample_id, set())
        if not self.has_rewards or (record.generation, record.reward) in rewards:
            return
        if self._may_lack(group, "reward.scores", sample.partition, record.owner):
            sums.unproven["the rewards of {} trained samples were scored"] += 1
        else:
            what = f"{sample.sample_id} in train step {sample.train_step}: {record.reward:g}"
            sums.findings.add(
                Rule.NOT_SCORED,
                (
                    f"{what}, scored "
                    f"{', '.join(f'{reward:g}' for _, reward in sorted(rewards)) or 'never'}"
                ),
            )

    def _may_lack(self, group: GroupFacts, entity: str, partition: int, version: int) -> bool:
        """Tell whether records of a prompt group may be missing for want of retention, or of a
        sound disk.
        """
        return group.group_id in self._damaged_groups or (
            self.purged is not None and self.purged.had_version(entity, partition, version)
        )

    def _had_offset(self, entity: str, partition: int, offset: int) -> bool:
        return self.purged is not None and self.purged.had_offset(entity, partition, offset)

    def _had_issue(self, group: GroupFacts) -> bool:
        """Tell whether a prompt group that ended was issued by a record that is purged."""
        return (
            not group.is_issued
            and bool(group.ends)
            and self.purged is not None
            and self.purged.had_issue(group.group_id)
        )

    def _judge_group(self, group: GroupFacts) -> Sums:
        """Judge what became of a prompt group, and count it."""
        sums = Sums(counts=self._counted(group))
        sums.unproven["{} prompt groups were issued before they ended"] += self._had_issue(group)
        found = sums.findings
        times = Counter(sample.sample_id for sample in group.trained)
        for sample_id in sorted(name for name, count in times.items() if count > 1):
            found.add(
                Rule.TRAINED_TWICE, f"{sample_id} in train steps {_listed(group.train_steps)}"
            )
        if times:
            self._judge_training(group, found)
        self._judge_ends(group, found)
        if not group.ends and not times and group.is_issued and not is_guest(group.group_id):
            self._judge_open(group, found)
        return sums

    def _judge_training(self, group: GroupFacts, found: Findings) -> None:
        where = f"{group.group_id} in train step {_listed(group.train_steps)}"
        if is_guest(group.group_id):
            found.add(Rule.GUEST, where)
        elif not (
            group.is_issued or self._had_issue(group) or group.group_id in self._damaged_groups
        ):
            found.add(Rule.NEVER_ISSUED, where)
        if not self.of_replay:
            wanted = group.num_samples or next(
                (record.num_samples for record in group.ready_and_trained), len(group.trained_ids)
            )
            whole = {f"{group.group_id}/{index}" for index in range(wanted)}
            generations = {(record.owner, record.generation) for record in group.ready_and_trained}
            if group.trained_ids != whole or (len(generations) > 1 and len(group.train_steps) == 1):
                mixed = f", of {len(generations)} generations" if len(generations) > 1 else ""
                found.add(
                    Rule.NOT_WHOLE, f"{where}: {len(group.trained_ids)} of {wanted} samples{mixed}"
                )
            else:
                for sample_id in sorted(group.generated.keys() - whole):
                    found.add(Rule.LOST, sample_id)
        if not group.ends:
            found.add(Rule.NO_END, where)

    def _judge_ends(self, group: GroupFacts, found: Findings) -> None:
        outcomes = list(dict.fromkeys(end.outcome.value for end in group.ends))
        if len(outcomes) > 1:
            found.add(Rule.TWO_WAYS, f"{group.group_id}: {', then '.join(outcomes)}")
        elif len(group.ends) > 1:
            found.add(Rule.ENDED_TWICE, f"{group.group_id}: {outcomes[0]}, {len(group.ends)} times")
        for end in group.ends[:1]:
            if end.outcome is Outcome.TRAINED and not group.trained:
                found.add(Rule.END_WITHOUT_STEP, group.group_id)
            elif difference := self._difference(end, group):
                found.add(Rule.OTHER_END, f"{group.group_id}: {difference}")
            if end.outcome is not Outcome.TRAINED and not end.reason:
                found.add(Rule.NO_REASON, f"{group.group_id}: {end.outcome}")

    def _difference(self, end: PromptGroupEnded, group: GroupFacts) -> str:
        """Return what an end says otherwise than the prompt group's id and train step; empty where
        they agree.
        """
        seat, steps, records = group.seat, group.train_steps, group.ready_and_trained
        if seat is not None and (end.train_step, end.group_index, end.attempt) != (
            seat.place.train_step,
            seat.place.group_index,
            seat.attempt,
        ):
            return f"its end names seat {end.train_step}/{end.group_index}, attempt {end.attempt}"
        if end.outcome is not Outcome.TRAINED:
            return (
                f"it ended as {end.outcome}, and train step {_listed(steps)} trained it"
                if steps and len(group.ends) == 1
                else ""
            )
        if end.trainer_version not in steps:
            return (
                f"its end names train step {end.trainer_version}, it was trained in "
                f"{_listed(steps)}"
            )
        if len(records) != len(group.trained_ids):
            return ""
        if end.policy_version != (oldest := min(record.oldest for record in records)):
            return f"its end names version {end.policy_version}, its oldest tokens are of {oldest}"
        mean = sum(record.reward for record in records) / len(records)
        if end.mean_reward is not None and not math.isclose(
            end.mean_reward, mean, rel_tol=1e-6, abs_tol=1e-9
        ):
            return f"its end names the mean reward {end.mean_reward:g}, its samples' is {mean:g}"
        return ""

    def _judge_open(self, group: GroupFacts, found: Findings) -> None:
        """Judge a prompt group without an end: it may be in flight, unless the trainer has passed
        it over or trained its step.
        """
        records, place = group.newest_records, group.seat.place if group.seat else None
        if records and all(offset < self._consumed.get(at, 0) for at, offset in records.items()):
            (entity, partition), offset = max(records.items())
            where = (
                f"{entity}[{partition}]@{offset}, consumed up to "
                f"{self._consumed[entity, partition]}"
            )
            found.add(Rule.PASSED_OVER, f"{group.group_id}: its newest record is {where}")
        elif place is not None and place.train_step < self._whole_below:
            found.add(
                Rule.LEFT_OPEN, f"{group.group_id}; steps are trained up to {self._next_step - 1}"
            )

    @property
    def _whole_below(self) -> int:
        """The step before which every seat must have been trained: where stragglers may be
        overtaken, only once the goal is reached.
        """
        return (
            self._next_step
            if self.in_order or self._next_step == self.last_version
            else self.first_version
        )

    def _judge_seats(self, groups: dict[str, GroupFacts]) -> Findings:
        found = Findings()
        seats: dict[int, list[str]] = {}
        for group in groups.values():
            if group.trained and group.seat is not None:
                seats.setdefault(group.seat.place.group_index, []).append(group.group_id)
        for names in seats.values():
            if len(names) > 1:
                found.add(Rule.SEAT_TWICE, f"{' and '.join(sorted(names))}")
        return found

    def _counted(self, group: GroupFacts) -> Counter[str]:
        """Count a prompt group and its samples."""
        counts = Counter[str](
            {
                "trained samples": len(group.trained_ids),
                "trained twice": sum(
                    count > 1
                    for count in Counter(sample.sample_id for sample in group.trained).values()
                ),
            }
        )
        was_purged = self._had_issue(group)
        is_ours = group.is_issued or was_purged
        if is_ours and is_guest(group.group_id):
            counts["guests"] += 1
        elif is_ours:
            outcome = group.ends[0].outcome.value if group.ends else "in_flight"
            counts += Counter({"issued": 1, outcome: 1})
        counts["purged groups"] += was_purged
        counts["purged samples"] += (
            sum(not group.generated.get(name) for name in group.trained_ids)
            if self._were_generated(group)
            else 0
        )
        is_counted = is_ours and not is_guest(group.group_id)
        counts["rolled out" if is_counted else "foreign"] += len(group.generated)
        counts["regenerated"] += group.num_generated - len(group.generated) if is_counted else 0
        if group.ends and group.ends[0].outcome is Outcome.TRAINED:
            counts["lost"] += len(group.generated.keys() - group.trained_ids)
        return counts

    def _were_generated(self, group: GroupFacts) -> bool:
        """Tell whether what lacks of the samples of a trained prompt group was purged."""
        partitions = {sample.partition for sample in group.trained}
        return any(self._had_offset("rollout.samples", partition, 0) for partition in partitions)

    def _live(self) -> Iterable[GroupFacts]:
        return (group for groups in self._groups.values() for group in groups.values())

    def _sums(self) -> Sums:
        """Return the sums of everything that has been fed."""
        sums = Sums()
        sums.add(self._settled)
        for judged in self._judged():
            sums.add(judged)
        return sums

    def _judged(self) -> Iterator[Sums]:
        for step in sorted(self._steps):
            yield self._judge_step(self._steps[step])
        for group in self._live():
            yield self._judge_group(group)
        for groups in self._groups.values():
            yield Sums(findings=self._judge_seats(groups))
        yield Sums(findings=self._judge_pairs())

    def _judge_pairs(self) -> Findings:
        found, known = Findings(), self._settled.findings.counts
        if (
            self._next_version > self.first_version
            and not known.keys() & {Rule.STEPS, Rule.VERSIONS}
            and self._next_version != self._next_step + 1
        ):
            found.add(
                Rule.UNPAIRED,
                (
                    f"version {self._next_version - 1} is the newest, and train step "
                    f"{self._next_step - 1}"
                ),
            )
        return found

    def figures(self) -> dict[str, Any]:
        """Return the books' sums."""
        sums = self._sums()
        counts, ages = sums.counts, sums.staleness
        total = ages.total()
        passed_over = Counter(
            {
                name.removeprefix("passed over: "): count
                for name, count in counts.items()
                if name.startswith("passed over: ")
            }
        )
        passed_over.update(reason for _, reason in self._passed_over.values())
        return {
            "steps": self._num_steps,
            "outcomes": {
                name: counts[name] for name in ("issued", "trained", *UNTRAINED, "in_flight")
            },
            "prompts_passed_over": dict(sorted(passed_over.items())),
            "prompt_groups_of_guests": counts["guests"],
            "prompt_groups_purged": counts["purged groups"],
            "samples_purged": counts["purged samples"],
            "samples_rolled_out": counts["rolled out"],
            "samples_foreign": counts["foreign"],
            "records_unreadable": self.num_unreadable,
            "samples_trained": counts["trained samples"],
            "samples_trained_twice": counts["trained twice"],
            "samples_lost": counts["lost"],
            "updates_skipped": counts["updates skipped"],
            "rollouts_regenerated": counts["regenerated"],
            "staleness_max": max(ages, default=0),
            "staleness_mean": sum(age * count for age, count in ages.items()) / total
            if total
            else 0.0,
            "staleness_counts": [ages[age] for age in range(max(ages, default=0) + 1)],
        }

    def findings(self) -> list[Finding]:
        """Return every broken promise; an empty list is the proof."""
        return self._sums().findings.listed()

    def problems(self) -> list[str]:
        """Return every broken promise in a sentence, with an example and a remedy."""
        return [str(finding) for finding in self.findings()]

    def unproven(self) -> list[str]:
        """Return what a purge has left without proof; nothing where all records are kept."""
        because = "since their records are purged or damaged"
        return [
            f"that {claim.format(count)}, {because}"
            for claim, count in self._sums().unproven.items()
            if count
        ]

    def add_finding(self, rule: Rule, example: str) -> None:
        """Note what was found elsewhere than on the log."""
        self._settled.findings.add(rule, example)

    def add_unproven(self, claim: str, count: int) -> None:
        """Note what could not be looked at; `{}` in the claim stands for the count."""
        self._settled.unproven[claim] += count


def _contradiction(event: TrainStepCommitted) -> str:
    """Return where the fields of a step disagree; empty where they don't."""
    lengths = {
        name: len(getattr(event, name))
        for name in ("sample_ids", "partitions", "offsets", "ranks", "micro_batches")
    }
    if len(set(lengths.values())) > 1:
        return (
            "its lists differ in length: "
            f"{', '.join(f'{name} {length}' for name, length in lengths.items())}"
        )
    if event.policy_version != event.train_step + 1:
        return f"train step {event.train_step} makes version {event.policy_version}"
    named = {name.rpartition("/")[0] for name in event.sample_ids}
    if named != set(event.prompt_group_ids) or len(event.prompt_group_ids) != len(named):
        return (
            f"its samples are of {len(named)} prompt groups, it names {len(event.prompt_group_ids)}"
        )
    return ""


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _place(at: TopicOffset) -> str:
    return f"{at.topic}[{at.partition}]@{at.offset}"
