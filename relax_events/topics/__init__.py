"""The topic plan, and where in it a sample belongs: policy version -> slot -> partition."""

from relax_events.topics.partitions import (
    num_slots,
    partition_of,
    partitions_of_slot,
    shard_of,
    slot_of,
)
from relax_events.topics.plan import TopicPlan, TopicSpec

__all__ = [
    "TopicPlan",
    "TopicSpec",
    "num_slots",
    "partition_of",
    "partitions_of_slot",
    "shard_of",
    "slot_of",
]
