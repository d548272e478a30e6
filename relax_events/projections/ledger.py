"""Recomputes a run's ledger from its records, without trusting the trainer.

A `Ledger` is given every event with its position: in log order within a topic, in any order between
topics. It gathers facts about prompt groups and train steps, and checks each once all its records
are there. `finalize` states up to which version every event has been applied: older facts are
checked, counted and dropped, so memory grows with the staleness window and not with the run. Open
facts are checked whenever the result is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

from relax_events.errors import CorruptRecord
from relax_events.events.parts import (
    Outcome,
    SampleEvent,
    SampleOutcome,
    TopicOffset,
    is_reward,
)
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.projections.ledger_facts import (
    AdvantageCheck,
    Evidence,
    Generated,
    GroupFacts,
    Ready,
    StepFacts,
    Trained,
    digest_evaluation,
    digest_reward_parts,
)
from relax_events.projections.ledger_findings import (
    WARNINGS,
    Comparison,
    Finding,
    LedgerTotals,
    Rule,
)
from relax_events.projections.ledger_group_check import GroupCheck, check_slots
from relax_events.projections.ledger_step_check import SequenceCheck, StepCheck
from relax_events.projections.purged_ranges import PurgedRanges
from relax_events.staleness import IssuedGroup, is_external
from relax_events.topics import TopicPlan
from relax_events.topics.names import TRAINER_INPUTS, TRAINING_SAMPLES
from relax_events.topics.partitions import count_slots
from relax_events.topics.plan import allowed_outcomes, belongs_on

UNPARSEABLE, EXTERNAL = -1, -2
"""Stand for the train step of a malformed prompt group id, and of external prompt groups."""
UNTRAINED_OUTCOMES = ("filtered", "expired", "failed")
MAX_OPEN_SPARES = 100_000
"""Spares without an outcome whose names are held; behind so many the trainer ends none any more."""


@dataclass(slots=True)
class Ledger:
    """The ledger of a run. See the module's docstring.

    Attributes:
        max_staleness: The bound, in policy versions.
        first_version: The version that the run began with.
        last_version: The version that is the run's goal, -1 where there is none.
        in_order: Whether a step trains only prompt groups issued for it or an earlier one.
        has_rewards: Whether every trained sample has a score on reward.scores.
        purged: What may be missing from the log; None where it has never been purged.
        is_replay: Whether the batches are those of a parent run: each step is compared with the
            parent's, whose own ledger checks the rest.
        advantages: Computes advantages again; None to leave that out.
        is_foreign: Whether no prompter of the run issues such a prompt group; None if all count.
    """

    max_staleness: int
    first_version: int = 0
    last_version: int = -1
    in_order: bool = True
    has_rewards: bool = True
    purged: PurgedRanges | None = None
    is_replay: bool = False
    advantages: AdvantageCheck | None = None
    is_foreign: Callable[[PromptGroupIssued], bool] | None = None
    num_unreadable: int = 0
    _final: LedgerTotals = field(default_factory=LedgerTotals)
    _groups: dict[int, dict[str, GroupFacts]] = field(default_factory=dict)
    _steps: dict[int, StepFacts] = field(default_factory=dict)
    _parent_steps: dict[int, StepFacts] = field(default_factory=dict)
    _last_index: dict[int, int] = field(default_factory=dict)
    _closed_below: int = 0
    _closed: set[int] = field(default_factory=set)
    _sequence: SequenceCheck = field(init=False)
    _skipped_rows: dict[str, tuple[int, str]] = field(default_factory=dict)
    _differences: dict[str, str] = field(default_factory=dict)
    _ended_external: set[str] = field(default_factory=set)
    _open_spares: dict[str, None] = field(default_factory=dict)
    """Names of the spares without an outcome whose steps are finalized."""
    _evidence: Evidence = field(init=False)
    _step_check: StepCheck = field(init=False)
    _group_check: GroupCheck = field(init=False)

    def __post_init__(self) -> None:
        self._closed_below = self.first_version
        self._sequence = SequenceCheck(self.first_version, self._final)
        self._evidence = Evidence(self.purged)
        self._step_check = StepCheck(
            self.max_staleness,
            self.has_rewards,
            self.is_replay,
            self._evidence,
            self._group,
            self._parent_steps,
            checks_advantages=self.advantages is not None,
        )
        self._group_check = GroupCheck(
            self.is_replay, self._evidence, self._sequence.consumed, self._last_index
        )

    @property
    def num_held(self) -> int:
        """Number of prompt groups and train steps in memory."""
        return sum(map(len, self._groups.values())) + len(self._steps)

    def apply(self, event: Event, at: TopicOffset, *, key: str = "") -> None:
        """Apply an event.

        Args:
            event: Of any topic that the ledger reads. Other events have no effect, nor has an event
                on a topic that doesn't hold its kind.
            at: The position of its record.
            key: The key of its record, "" if unknown. The trainer rejects a sample under the key of
                another prompt group, so its offsets may pass such a record.
        """
        if not belongs_on(TopicPlan.parse_entity(at.topic), event):
            return
        if isinstance(event, PromptGroupIssued):
            if self.is_foreign is None or not self.is_foreign(event):
                self._apply_issue(event)
        elif isinstance(event, SampleEvent):
            self._apply_sample(event, at, key)
        elif isinstance(event, PromptGroupEnded):
            self._apply_outcome(event, at)
        elif isinstance(event, PolicyVersionPublished):
            self._sequence.apply_version(event, _position(at))
            if self.purged is not None:
                self.purged.apply(event)
        elif isinstance(event, TrainStepCommitted):
            self._apply_step(event, _position(at))

    def apply_parent_step(self, step: TrainStepCommitted) -> None:
        """Apply a step of the run that this one replays: its prompt groups count as issued and
        generated here.
        """
        self._parent_steps[step.train_step] = StepFacts.from_event(step)
        for sample in self._parent_steps[step.train_step].samples:
            if (group := self._group(sample.sample_id.rpartition("/")[0])) is not None:
                group.is_issued = True
                group.generated.setdefault(sample.sample_id, [])
                group.num_generated += 1

    def count_unreadable(self) -> None:
        """Count a record that can't be decoded: it may be refused, it must not be trained."""
        self.num_unreadable += 1

    def finalize(self, below: int) -> None:
        """Check and drop the facts of versions and train steps below this one, all of whose events
        have been applied.
        """
        for step in sorted(
            step for step, facts in self._steps.items() if step < below and self._is_read(facts)
        ):
            self._final.add(self._step_check.check(self._steps.pop(step)))
            self._parent_steps.pop(step, None)
        kept = 2 * count_slots(self.max_staleness)
        open_ids = {
            sample.sample_id.rpartition("/")[0]
            for facts in self._steps.values()
            for sample in facts.samples
        }
        for step, groups in list(self._groups.items()):
            is_complete = open_ids.isdisjoint(groups) and all(
                group.outcomes or not group.is_issued or self._is_spare(group)
                for group in groups.values()
            )
            if self.first_version <= step < below - kept and is_complete:
                self._finalize_step(step)
        self._finalize_external(open_ids)
        if self.purged is not None:
            self.purged.forget_before(below - kept)

    def _is_spare(self, group: GroupFacts) -> bool:
        """Return whether a step has its batch without a prompt group that was issued for it. It may
        end long after the step, or never: with the worker that had it.
        """
        slot = group.batch_slot.slot if group.batch_slot else None
        return (
            slot is not None
            and 0 <= self._last_index.get(slot.train_step, -1) < slot.group_index
            and not group.trained
        )

    def _is_read(self, step: StepFacts) -> bool:
        """Return whether every record that a step names was read. A record at another position than
        named comes later, or never.
        """
        return self.is_replay or all(
            (group := self._group(sample.sample_id.rpartition("/")[0])) is None
            or sample.position in group.ready
            or self._evidence.is_missing(sample)
            for sample in step.samples
        )

    def _finalize_external(self, open_ids: set[str]) -> None:
        """Count ended external prompt groups, one call after they ended: their ids carry no step,
        and copies of their records are close together on the log.
        """
        external = self._groups.get(EXTERNAL, {})
        for name in [name for name in external if name in self._ended_external - open_ids]:
            self._drop_group(external.pop(name))
        self._ended_external = {name for name, group in external.items() if group.outcomes}

    def _finalize_step(self, step: int) -> None:
        groups = self._groups.pop(step)
        for group in groups.values():
            self._drop_group(group)
            if group.is_issued and not group.outcomes:
                self._open_spares[group.group_id] = None
        while len(self._open_spares) > MAX_OPEN_SPARES:
            del self._open_spares[next(iter(self._open_spares))]
        self._last_index.pop(step, None)
        self._final.findings.add_all(check_slots(groups))
        self._closed.add(step)
        while self._closed_below in self._closed:
            self._closed.remove(self._closed_below)
            self._closed_below += 1
        for row in [row for row, (carrier, _) in self._skipped_rows.items() if carrier == step]:
            self._final.counts[f"skipped: {self._skipped_rows.pop(row)[1]}"] += 1

    def _group(self, group_id: str) -> GroupFacts | None:
        """Return the facts of a prompt group; None once it is finalized."""
        try:
            slot = IssuedGroup.parse(group_id)
        except CorruptRecord:
            slot = None
        step = (
            UNPARSEABLE
            if slot is None
            else EXTERNAL
            if is_external(group_id)
            else slot.slot.train_step
        )
        if self.first_version <= step < self._closed_below or step in self._closed:
            return None
        groups = self._groups.setdefault(step, {})
        return groups.get(group_id) or groups.setdefault(group_id, GroupFacts(group_id, slot))

    def _apply_issue(self, event: PromptGroupIssued) -> None:
        if (group := self._group(event.prompt_group_id)) is None:
            if event.lost_worker == "":
                late = f"{event.prompt_group_id}: again after it ended"
                self._final.findings.add(Rule.ISSUED_TWICE, late)
            return
        group.is_issued, group.num_samples = True, event.samples_per_prompt
        group.num_issues += not event.lost_worker
        group.are_issues_explained &= event.lost_worker is not None
        for row, reason in event.skipped_rows.items():
            self._skipped_rows.setdefault(
                row,
                (
                    UNPARSEABLE if group.batch_slot is None else group.batch_slot.slot.train_step,
                    reason,
                ),
            )

    def _apply_sample(self, event: SampleEvent, at: TopicOffset, key: str) -> None:
        group = self._group(event.prompt_group_id)
        if isinstance(event, SampleRolledOut):
            if group is None:
                is_spare = event.prompt_group_id in self._open_spares
                self._final.counts["rolled out" if is_spare else "regenerated"] += 1
                return
            copies = group.generated.setdefault(event.sample_id, [])
            group.num_generated += 1
            copy = Generated.from_event(event, offset=at.offset, has_segments=self.has_rewards)
            if all(other[:-1] != copy[:-1] for other in copies):
                copies.append(copy)
        elif group is not None and isinstance(event, SampleScored):
            is_usable = event.error is None and all(map(is_reward, event.components.values()))
            if event.reward is not None and is_usable and is_reward(event.reward):
                group.rewards.setdefault(event.sample_id, set()).add(
                    (intern(event.key.generation_digest), event.reward, digest_reward_parts(event))
                )
        elif group is not None and isinstance(event, SampleEvaluated):
            group.evaluated.setdefault(event.sample_id, set()).add(
                (intern(event.key.generation_digest), digest_evaluation(event))
            )
        elif group is not None and isinstance(event, SampleReady):
            position = at.partition, at.offset, event.sample_id
            group.ready[position] = Ready.from_event(event, key=key, has_segments=self.has_rewards)
            verdicts = self.advantages.add(event, position) if self.advantages else ()
            for at_sample, verdict in verdicts:
                group.ready[at_sample] = group.ready[at_sample]._replace(verdict=verdict)

    def _apply_outcome(self, event: PromptGroupEnded, at: TopicOffset) -> None:
        group = self._group(event.prompt_group_id)
        if (
            entity := TopicPlan.parse_entity(at.topic)
        ) in TRAINER_INPUTS:  # only a request; the trainer refuses other outcomes
            if group is not None and event.outcome in allowed_outcomes(entity):
                group.newest_requests[entity, at.partition] = at.offset
        elif event.prompt_group_id in self._open_spares and event.outcome is not Outcome.TRAINED:
            del self._open_spares[event.prompt_group_id]
            self._final.counts["in_flight"] -= 1
            self._final.counts[event.outcome.value] += 1
        elif group is None:
            self._final.findings.add(
                Rule.DUPLICATE_OUTCOME,
                f"{event.prompt_group_id}: {event.outcome} again at {_position(at)}",
            )
        else:
            group.outcomes.append(event)

    def _apply_step(self, event: TrainStepCommitted, where: str) -> None:
        self._sequence.apply_step(event, where)
        if len({len(event.sample_ids), len(event.partitions), len(event.offsets)}) > 1:
            return
        facts = StepFacts.from_event(event)
        for sample in facts.samples:
            self._apply_trained(sample, where)
        self._sequence.apply_consumed(event, where)
        self._steps.setdefault(event.train_step, facts)
        if self.in_order:
            slots = [
                group.batch_slot.slot
                for name in event.prompt_group_ids
                if (group := self._group(name)) is not None and group.batch_slot is not None
            ]
            self._last_index[event.train_step] = max(
                (slot.group_index for slot in slots if slot.train_step == event.train_step),
                default=-1,
            )

    def _apply_trained(self, sample: Trained, where: str) -> None:
        group = self._group(sample.sample_id.rpartition("/")[0])
        if group is None:
            self._final.findings.add(
                Rule.TRAINED_TWICE,
                f"{sample.sample_id} again in train step {sample.train_step}, {where}",
            )
            self._final.counts["trained twice"] += 1
            return
        is_again = sample.sample_id in group.trained_ids
        group.trained.append(sample)
        consumed = self._sequence.consumed.get((TRAINING_SAMPLES, sample.partition), 0)
        if sample.offset < consumed and not (is_again or self.is_replay):
            what = f"{sample.sample_id} at offset {sample.offset} of partition {sample.partition}"
            self._final.findings.add(
                Rule.TRAINED_BELOW_OFFSET, f"{what}, consumed up to {consumed} before {where}"
            )

    def _drop_group(self, group: GroupFacts) -> None:
        """Count a prompt group that is read completely."""
        self._final.add(self._check_group(group))
        if self.advantages is not None:
            self.advantages.forget(group.group_id)

    def _check_group(self, group: GroupFacts) -> LedgerTotals:
        return self._group_check.check(
            group, complete_below=self._complete_below, last_step=self._sequence.next_step - 1
        )

    @property
    def _complete_below(self) -> int:
        """The step below which every batch slot must have been trained. Where ready samples may
        overtake others, this holds only at the goal.
        """
        return (
            self._sequence.next_step
            if self.in_order or self._sequence.next_step == self.last_version
            else self.first_version
        )

    def _open_groups(self) -> Iterable[GroupFacts]:
        return (group for groups in self._groups.values() for group in groups.values())

    def _all_totals(self) -> LedgerTotals:
        """Return the totals of everything that was applied."""
        totals = LedgerTotals()
        totals.add(self._final)
        for part in self._open_totals():
            totals.add(part)
        return totals

    def _open_totals(self) -> Iterator[LedgerTotals]:
        for step in sorted(self._steps):
            yield self._step_check.check(self._steps[step])
        for group in self._open_groups():
            yield self._check_group(group)
        for groups in self._groups.values():
            yield LedgerTotals(findings=check_slots(groups))
        yield LedgerTotals(findings=self._sequence.check_pairs())

    def totals(self) -> dict[str, Any]:
        """Return the ledger's totals, as the report shows them."""
        totals = self._all_totals()
        counts, ages = totals.counts, totals.staleness
        total = ages.total()
        skipped = Counter(
            {
                name.removeprefix("skipped: "): count
                for name, count in counts.items()
                if name.startswith("skipped: ")
            }
        )
        skipped.update(reason for _, reason in self._skipped_rows.values())
        return {
            "steps": self._sequence.num_steps,
            "outcomes": {
                name: counts[name]
                for name in ("issued", "trained", *UNTRAINED_OUTCOMES, "in_flight")
            },
            "prompt_groups_too_large": counts["too large"],
            "prompts_skipped": dict(sorted(skipped.items())),
            "prompt_groups_external": counts["external"],
            "prompt_groups_issued_twice": totals.findings.counts.get(Rule.ISSUED_TWICE, 0),
            "prompt_groups_purged": counts["purged groups"],
            "samples_purged": counts["purged samples"],
            "samples_rolled_out": counts["rolled out"],
            "samples_foreign": counts["foreign"],
            "records_unreadable": self.num_unreadable,
            "samples_trained": counts["trained samples"],
            "samples_by_outcome": {
                outcome.value: counts[f"trained: {outcome}"] for outcome in SampleOutcome
            },
            "samples_trained_twice": counts["trained twice"],
            "samples_lost": counts["lost"],
            "updates_skipped": counts["updates skipped"],
            "updates_held": counts["updates held"],
            "rollouts_regenerated": counts["regenerated"],
            "staleness_max": max(ages, default=0),
            "staleness_mean": sum(age * count for age, count in ages.items()) / total
            if total
            else 0.0,
            "staleness_counts": [ages[age] for age in range(max(ages, default=0) + 1)],
        }

    def findings(self) -> list[Finding]:
        """Return every broken promise; an empty list proves the run."""
        return [
            replace(
                one, examples=tuple(name + self._differences.get(name, "") for name in one.examples)
            )
            for one in self._all_totals().findings.as_list(set(Rule) - WARNINGS)
        ]

    def warnings(self) -> list[Finding]:
        """Return what cost work and broke no promise."""
        return self._all_totals().findings.as_list(WARNINGS)

    def problems(self) -> list[str]:
        """Return every broken promise as a sentence, with an example and a remedy."""
        return [str(finding) for finding in self.findings()]

    def unverified(self) -> list[str]:
        """Return what can't be verified, with the reason; nothing where all records are kept and
        have digests.
        """
        return [
            f"that {claim.format(count)}"
            for claim, count in self._all_totals().unverified.items()
            if count
        ]

    @property
    def comparisons(self) -> Mapping[str, Comparison]:
        """The records whose difference would explain an example of a finding, by the example."""
        return self._all_totals().findings.comparisons

    def add_difference(self, example: str, difference: str) -> None:
        """Add to an example of a finding in what its records differ."""
        self._differences[example] = f": {difference}"

    def add_finding(self, rule: Rule, example: str) -> None:
        """Add a finding from outside the log."""
        self._final.findings.add(rule, example)

    def add_unverified(self, claim: str, count: int) -> None:
        """Add something that could not be checked, with the reason; `{}` stands for the count."""
        self._final.unverified[claim] += count


def _position(at: TopicOffset) -> str:
    return f"{at.topic}[{at.partition}]@{at.offset}"
