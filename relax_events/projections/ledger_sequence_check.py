"""Checks the order of train steps, policy versions and consumed offsets."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_events.events.types import PolicyVersionPublished, TrainStepCommitted
from relax_events.projections.ledger_facts import find_contradiction
from relax_events.projections.ledger_findings import Findings, LedgerTotals, Rule
from relax_events.topics import TopicPlan


@dataclass(slots=True)
class SequenceCheck:
    """Checks that train steps, policy versions and consumed offsets follow each other.

    Attributes:
        first_version: The version that the run began with.
        totals: Receives the findings.
        next_step: The train step that must come next.
        next_version: The policy version that must come next.
        num_steps: Distinct train steps so far.
        newest_weights: Version and digest of the newest committed weights.
        consumed: The next offset of the trainer's input, by entity and partition.
    """

    first_version: int
    totals: LedgerTotals
    next_step: int = field(init=False)
    next_version: int = field(init=False)
    num_steps: int = 0
    newest_weights: tuple[int, bytes] = (-1, b"")
    consumed: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_step = self.next_version = self.first_version

    def apply_version(self, event: PolicyVersionPublished, where: str) -> None:
        """Check that a version follows the one before."""
        if event.policy_version != self.next_version:
            self.totals.findings.add(
                Rule.VERSION_ORDER,
                (f"{where} publishes {event.policy_version} where {self.next_version} must come"),
            )
        self.next_version = max(self.next_version, event.policy_version + 1)

    def apply_step(self, event: TrainStepCommitted, where: str) -> None:
        """Check a step's order, its fields, and the weights of a skipped update."""
        step, findings = event.train_step, self.totals.findings
        if step != self.next_step:
            findings.add(
                Rule.STEP_ORDER, f"{where} commits {step} where {self.next_step} must come"
            )
        self.num_steps += step >= self.next_step
        self.next_step = max(self.next_step, step + 1)
        if reason := find_contradiction(event):
            findings.add(Rule.BAD_STEP, f"{where}: {reason}")
        self._check_weights(event, where)

    def apply_consumed(self, event: TrainStepCommitted, where: str) -> None:
        """Check that no consumed offset goes back."""
        for position in event.consumed:
            topic_partition = (TopicPlan.parse_entity(position.topic), position.partition)
            if position.offset < (before := self.consumed.get(topic_partition, 0)):
                what = (
                    f"{topic_partition[0]}[{position.partition}] from {before} to {position.offset}"
                )
                self.totals.findings.add(Rule.OFFSET_WENT_BACK, f"{what} in {where}")
            self.consumed[topic_partition] = max(position.offset, before)

    def check_pairs(self) -> Findings:
        """Check that the newest version has its train step."""
        findings, known = Findings(), self.totals.findings.counts
        if (
            self.next_version > self.first_version
            and not known.keys() & {Rule.STEP_ORDER, Rule.VERSION_ORDER}
            and self.next_version != self.next_step + 1
        ):
            findings.add(
                Rule.UNPAIRED,
                (
                    f"version {self.next_version - 1} is the newest, and train step "
                    f"{self.next_step - 1}"
                ),
            )
        return findings

    def _check_weights(self, event: TrainStepCommitted, where: str) -> None:
        """Check that a skipped update kept the weights of the previous step, where that is on the
        log.
        """
        before, self.newest_weights = (
            self.newest_weights,
            (event.policy_version, event.weights_digest),
        )
        self.totals.counts["updates skipped"] += event.update_skipped
        if (
            event.update_skipped
            and before[0] == event.train_step
            and before[1] != event.weights_digest
        ):
            self.totals.findings.add(Rule.SKIPPED_MOVED, where)
