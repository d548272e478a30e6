"""Checks a prompt group: issued, trained completely at most once, and ended with the matching
outcome.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relax_events.events.generations import DIGEST_FORM, Trajectory, digest_generation
from relax_events.events.parts import TOO_LARGE, Outcome
from relax_events.events.types import PromptGroupEnded
from relax_events.projections.ledger_facts import Evidence, Generated, GroupFacts
from relax_events.projections.ledger_findings import PURGED, Findings, LedgerTotals, Rule
from relax_events.staleness import is_external
from relax_events.topics.names import TRAINING_SAMPLES


@dataclass(slots=True)
class GroupCheck:
    """Checks one prompt group: trained completely or not at all, with one matching outcome.

    Attributes:
        is_replay: Whether the batches are those of a parent run.
        evidence: Records that may be missing.
        consumed: The next offset of the trainer's input, by entity and partition.
        last_index: Index of the last prompt group that each step trained, where a step trains only
            prompt groups issued for it: those behind it are spares, which may still be in flight.
    """

    is_replay: bool
    evidence: Evidence
    consumed: Mapping[tuple[str, int], int]
    last_index: Mapping[int, int]

    def check(self, group: GroupFacts, *, complete_below: int, last_step: int) -> LedgerTotals:
        """Check a prompt group, and count it."""
        totals = LedgerTotals(counts=self._count(group))
        totals.unverified[f"{{}} prompt groups were issued before they ended, {PURGED}"] += (
            self.evidence.lost_issue(group)
        )
        findings = totals.findings
        if group.num_issues > 1 and not is_external(group.group_id):
            if group.are_issues_explained:
                findings.add(Rule.ISSUED_TWICE, f"{group.group_id}: {group.num_issues} times")
            else:
                totals.unverified[
                    "{} prompt groups were issued once, since a record of an older release doesn't "
                    "say whether it was for a silent worker"
                ] += 1
        times = Counter(sample.sample_id for sample in group.trained)
        for sample_id in sorted(name for name, count in times.items() if count > 1):
            findings.add(
                Rule.TRAINED_TWICE, f"{sample_id} in train steps {_join(group.train_steps)}"
            )
        if times:
            self._check_training(group, findings)
            self._check_generation(group, totals)
        self._check_outcomes(group, findings)
        if not group.outcomes and not times and group.is_issued and not is_external(group.group_id):
            self._check_open(group, findings, complete_below=complete_below, last_step=last_step)
        return totals

    def _check_training(self, group: GroupFacts, findings: Findings) -> None:
        where = f"{group.group_id} in train step {_join(group.train_steps)}"
        if is_external(group.group_id):
            findings.add(Rule.EXTERNAL_TRAINED, where)
        elif not (group.is_issued or self.evidence.lost_issue(group)):
            findings.add(Rule.NEVER_ISSUED, where)
        if not self.is_replay:
            num_expected = group.num_samples or next(
                (record.num_samples for record in group.ready_and_trained), len(group.trained_ids)
            )
            expected_ids = {f"{group.group_id}/{index}" for index in range(num_expected)}
            generations = {(record.owner, record.generation) for record in group.ready_and_trained}
            if group.trained_ids != expected_ids or (
                len(generations) > 1 and len(group.train_steps) == 1
            ):
                mixed = f", of {len(generations)} generations" if len(generations) > 1 else ""
                findings.add(
                    Rule.INCOMPLETE_GROUP,
                    f"{where}: {len(group.trained_ids)} of {num_expected} samples{mixed}",
                )
            else:
                for sample_id in sorted(group.generated.keys() - expected_ids):
                    findings.add(Rule.SAMPLE_NOT_TRAINED, sample_id)
        if not group.outcomes:
            findings.add(Rule.NO_OUTCOME, where)

    def _check_generation(self, group: GroupFacts, totals: LedgerTotals) -> None:
        """Check that the samples of a prompt group are those of its generation's digest, where all
        that was trained is on the log as it was generated.
        """
        copies: dict[str, Generated] = {}
        for record in group.ready_and_trained:
            copy = record.find_copy(group.generated.get(record.sample_id, ()))
            if copy is not None:
                copies[record.sample_id] = copy
        generations = {(copy.owner, copy.generation) for copy in copies.values()}
        if len(copies) < len(group.trained_ids) or len(generations) != 1:
            return  # found by other rules, or purged
        ((owner, generation),) = generations
        for sample_id in group.generated.keys() - copies.keys():
            for copy in group.generated[sample_id]:
                if (copy.owner, copy.generation) == (owner, generation):
                    copies[sample_id] = copy
        if not generation.startswith(DIGEST_FORM):
            totals.unverified[
                "the samples of {} prompt groups are those that were generated together, since "
                "their generation has no digest of this release's form"
            ] += 1
            return
        digest = digest_generation(
            (
                (int(sample_id.rpartition("/")[2]), Trajectory(copy.tokens, copy.whole))
                for sample_id, copy in copies.items()
            ),
            prompt_group_id=group.group_id,
            policy_version=owner,
        )
        if digest != generation and not self.evidence.lost_samples(group):
            where = f"{group.group_id} in train step {_join(group.train_steps)}"
            totals.findings.add(
                Rule.OTHER_GENERATION, f"{where}: digest {generation}, its samples give {digest}"
            )

    def _check_outcomes(self, group: GroupFacts, findings: Findings) -> None:
        outcomes = list(dict.fromkeys(event.outcome.value for event in group.outcomes))
        if len(outcomes) > 1:
            findings.add(Rule.CONFLICTING_OUTCOMES, f"{group.group_id}: {', then '.join(outcomes)}")
        elif len(group.outcomes) > 1:
            findings.add(
                Rule.DUPLICATE_OUTCOME,
                f"{group.group_id}: {outcomes[0]}, {len(group.outcomes)} times",
            )
        for outcome in group.outcomes[:1]:
            if outcome.outcome is Outcome.TRAINED and not group.trained:
                findings.add(Rule.OUTCOME_WITHOUT_STEP, group.group_id)
            elif mismatch := self._find_mismatch(outcome, group):
                findings.add(Rule.OUTCOME_MISMATCH, f"{group.group_id}: {mismatch}")
            if outcome.outcome is not Outcome.TRAINED and not outcome.reason:
                findings.add(Rule.NO_REASON, f"{group.group_id}: {outcome.outcome}")

    def _find_mismatch(self, outcome: PromptGroupEnded, group: GroupFacts) -> str:
        """Return a difference between an outcome and the prompt group's id and train step; empty
        where they agree.
        """
        slot, steps, records = group.batch_slot, group.train_steps, group.ready_and_trained
        if slot is not None and (outcome.train_step, outcome.group_index, outcome.attempt) != (
            slot.slot.train_step,
            slot.slot.group_index,
            slot.attempt,
        ):
            return (
                f"its outcome names batch slot {outcome.train_step}/{outcome.group_index}, "
                f"attempt {outcome.attempt}"
            )
        if outcome.outcome is not Outcome.TRAINED:
            return (
                f"its outcome is {outcome.outcome}, and train step {_join(steps)} trained it"
                if steps and len(group.outcomes) == 1
                else ""
            )
        if outcome.trainer_version not in steps:
            return (
                f"its outcome names train step {outcome.trainer_version}, it was trained in "
                f"{_join(steps)}"
            )
        if len(records) != len(group.trained_ids):
            return ""
        if outcome.policy_version != (oldest := min(record.oldest for record in records)):
            return (
                f"its outcome names version {outcome.policy_version}, its oldest tokens are of "
                f"{oldest}"
            )
        rewards = [record.reward for record in records if record.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else math.nan
        if outcome.mean_reward is not None and not math.isclose(
            outcome.mean_reward, mean, rel_tol=1e-6, abs_tol=1e-9
        ):
            return (
                f"its outcome names the mean reward {outcome.mean_reward:g}, the mean of its "
                f"samples is {mean:g}"
            )
        return ""

    def _check_open(
        self, group: GroupFacts, findings: Findings, *, complete_below: int, last_step: int
    ) -> None:
        """Check a prompt group without an outcome: it may be in flight, unless the trainer's
        offsets have passed it or its step was trained.
        """
        records = self._newest_inputs(group)
        slot_position = group.batch_slot.slot if group.batch_slot else None
        if records and all(offset < self.consumed.get(at, 0) for at, offset in records.items()):
            (entity, partition), offset = max(records.items())
            where = (
                f"{entity}[{partition}]@{offset}, consumed up to {self.consumed[entity, partition]}"
            )
            findings.add(
                Rule.OFFSETS_WITHOUT_OUTCOME, f"{group.group_id}: its newest record is {where}"
            )
        elif (
            slot_position is not None
            and slot_position.train_step < complete_below
            and slot_position.group_index
            < self.last_index.get(slot_position.train_step, slot_position.group_index + 1)
        ):
            findings.add(
                Rule.STEP_WITHOUT_OUTCOME, f"{group.group_id}; steps are trained up to {last_step}"
            )

    def _newest_inputs(self, group: GroupFacts) -> dict[tuple[str, int], int]:
        """Return the offset of a prompt group's newest record in the trainer's input, by entity and
        partition. A sample that no rollout worker wrote does not count, as far as the log still has
        what they wrote: the trainer refuses it and waits for the valid ones.
        """
        newest = dict(group.newest_requests)
        takes_all = self.is_replay or self.evidence.lost_samples(group)
        for (partition, offset, _), record in group.ready.items():
            if record.is_keyed and (takes_all or group.is_generated(record)):
                at = TRAINING_SAMPLES, partition
                newest[at] = max(offset, newest.get(at, offset))
        return newest

    def _count(self, group: GroupFacts) -> Counter[str]:
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
        counts.update(f"trained: {record.sample_outcome}" for record in group.ready_and_trained)
        lost_issue = self.evidence.lost_issue(group)
        is_issued = group.is_issued or lost_issue
        if is_issued and is_external(group.group_id):
            counts["external"] += 1
        elif is_issued:
            outcome = group.outcomes[0].outcome.value if group.outcomes else "in_flight"
            counts += Counter({"issued": 1, outcome: 1})
            counts["too large"] += any(one.reason.startswith(TOO_LARGE) for one in group.outcomes)
        counts["purged groups"] += lost_issue
        counts["purged samples"] += (
            sum(not group.generated.get(name) for name in group.trained_ids)
            if self.evidence.lost_samples(group)
            else 0
        )
        is_counted = is_issued and not is_external(group.group_id)
        counts["rolled out" if is_counted else "foreign"] += len(group.generated)
        counts["regenerated"] += group.num_generated - len(group.generated) if is_counted else 0
        if group.outcomes and group.outcomes[0].outcome is Outcome.TRAINED:
            counts["lost"] += len(group.generated.keys() - group.trained_ids)
        return counts


def check_slots(groups: dict[str, GroupFacts]) -> Findings:
    """Check that no two prompt groups of one batch slot were trained."""
    findings = Findings()
    slots: dict[int, list[str]] = {}
    for group in groups.values():
        if group.trained and group.batch_slot is not None:
            slots.setdefault(group.batch_slot.slot.group_index, []).append(group.group_id)
    for names in slots.values():
        if len(names) > 1:
            findings.add(Rule.SLOT_TRAINED_TWICE, f"{' and '.join(sorted(names))}")
    return findings


def _join(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
