"""The topics of a run, and the partition of a sample: policy version -> slot -> partition."""

from relax_events.topics.partitions import (
    compute_partition,
    compute_shard,
    compute_slot,
    count_slots,
    list_slot_partitions,
)
from relax_events.topics.plan import TopicPlan, TopicSpec

__all__ = [
    "TopicPlan",
    "TopicSpec",
    "compute_partition",
    "compute_shard",
    "compute_slot",
    "count_slots",
    "list_slot_partitions",
]
