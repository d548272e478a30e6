"""Which records a ledger can't expect to find: purged and damaged ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_events.projections.ledger_facts import GroupFacts, Trained
from relax_events.projections.purged_ranges import PurgedRanges
from relax_events.topics.plan import TRAINING_SAMPLES


@dataclass(slots=True)
class Evidence:
    """Which records may be missing from the log: purged, or damaged on disk.

    Attributes:
        purged: What a purge may have deleted; None where the log was never purged.
        damaged_groups: Prompt groups with a record that fails its checksum.
        damaged_positions: Partition and offset of damaged records of trained samples.
    """

    purged: PurgedRanges | None
    damaged_groups: set[str] = field(default_factory=set)
    damaged_positions: set[tuple[int, int]] = field(default_factory=set)

    def is_missing(self, sample: Trained) -> bool:
        """Return whether the record of a trained sample is damaged or purged."""
        position = (sample.partition, sample.offset)
        return position in self.damaged_positions or self.is_purged(TRAINING_SAMPLES, *position)

    def may_lack(self, group: GroupFacts, entity: str, partition: int, version: int) -> bool:
        """Return whether records of a prompt group may be purged or damaged."""
        return group.group_id in self.damaged_groups or (
            self.purged is not None
            and self.purged.may_have_purged_version(entity, partition, version)
        )

    def is_purged(self, entity: str, partition: int, offset: int) -> bool:
        """Return whether the record at an offset is purged."""
        return self.purged is not None and self.purged.is_purged(entity, partition, offset)

    def lost_issue(self, group: GroupFacts) -> bool:
        """Return whether an ended prompt group may have been issued by a purged record."""
        return (
            not group.is_issued
            and bool(group.outcomes)
            and self.purged is not None
            and self.purged.may_have_purged_issue(group.group_id)
        )

    def lost_samples(self, group: GroupFacts) -> bool:
        """Return whether missing samples of a trained prompt group were purged."""
        partitions = {sample.partition for sample in group.trained}
        return any(self.is_purged("rollout.samples", partition, 0) for partition in partitions)
