"""Which records a purge may have deleted, derived from the partitions' beginning offsets and the
published start offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_events.events.types import PolicyVersionPublished
from relax_events.topics import TopicPlan, compute_shard
from relax_events.topics.names import PROMPT_GROUPS


@dataclass(slots=True)
class PurgedRanges:
    """The beginning offsets of the prompt queue and of the sample topics by (entity, partition),
    and where each version starts there.
    """

    plan: TopicPlan
    beginning_offsets: Mapping[tuple[str, int], int]
    version_starts: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)

    def apply(self, published: PolicyVersionPublished) -> None:
        """Record where a version's records start, if anything was purged at all."""
        if any(self.beginning_offsets.values()):
            self.version_starts[published.policy_version] = {
                (self.plan.parse_entity(at.topic), at.partition): at.offset
                for at in published.start_offsets
            }

    def forget_before(self, policy_version: int) -> None:
        """Drop the start offsets of older versions."""
        for version in [version for version in self.version_starts if version < policy_version]:
            del self.version_starts[version]

    def may_have_purged_issue(self, prompt_group_id: str) -> bool:
        """Return whether the record that issued a prompt group may have been purged."""
        partition = compute_shard(prompt_group_id, shards=self.plan.queue_partitions)
        return self.beginning_offsets.get((PROMPT_GROUPS, partition), 0) > 0

    def is_purged(self, entity: str, partition: int, offset: int) -> bool:
        """Return whether the record at an offset was purged."""
        return self.beginning_offsets.get((entity, partition), 0) > offset

    def may_have_purged_version(self, entity: str, partition: int, policy_version: int) -> bool:
        """Return whether records of a version may have been purged from one of its slot's
        partitions.
        """
        start = self.version_starts.get(policy_version, {}).get((entity, partition), 0)
        return self.is_purged(entity, partition, start)
