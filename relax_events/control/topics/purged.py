"""What a purge has taken from the log, as far as its ends tell: whether a record that is missing may have been there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_events.events.types import PolicyVersionPublished
from relax_events.topics import TopicPlan, shard_of


@dataclass(slots=True)
class PurgedLog:
    """The begins of the prompt queue and of `rollout.samples`, by (entity, partition), and where versions began there."""

    plan: TopicPlan
    begins: Mapping[tuple[str, int], int]
    starts: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, published: PolicyVersionPublished) -> None:
        """Take in where a version's records begin."""
        for at in published.start_offsets:
            if self.plan.entity(at.topic) == "rollout.samples":
                self.starts[published.policy_version, at.partition] = at.offset

    def had_issue(self, prompt_group_id: str) -> bool:
        """Tell whether the record that issued a prompt group may have been purged."""
        return self.begins.get(("prompt.groups", shard_of(prompt_group_id, shards=self.plan.queue_partitions)), 0) > 0

    def had_samples(self, prompt_group_id: str, policy_version: int) -> bool:
        """Tell whether the samples of a prompt group may have been purged.

        Args:
            prompt_group_id: Of the samples.
            policy_version: The oldest that its tokens came from; their slot may be that of an older one still.
        """
        for version in range(max(policy_version - self.plan.num_slots + 1, 0), policy_version + 1):
            partition = self.plan.partition(prompt_group_id, version)
            if self.begins.get(("rollout.samples", partition), 0) > self.starts.get((version, partition), 0):
                return True
        return False
