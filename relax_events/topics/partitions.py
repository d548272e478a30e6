"""The ring of policy versions: each version owns a slot, and each slot has the same number of
partitions (shards).
"""

from __future__ import annotations

import zlib

TopicPartition = tuple[str, int]
"""The full name of a topic, and a partition's number."""


def count_slots(max_staleness: int) -> int:
    """Return the number of slots of the ring.

    The window holds `max_staleness + 1` versions. One more slot lets the next version's records be
    written while late records of the version that left the window are still being skipped.
    """
    return max_staleness + 2


def compute_slot(policy_version: int, *, num_slots: int) -> int:
    """Return the slot that a policy version owns."""
    return policy_version % num_slots


def compute_shard(prompt_group_id: str, *, shards: int) -> int:
    """Return the shard of a prompt group, which is the same in every topic and version."""
    return zlib.crc32(prompt_group_id.encode()) % shards


def compute_partition(
    prompt_group_id: str, policy_version: int, *, num_slots: int, shards: int
) -> int:
    """Return the partition of a prompt group's samples, which is the same in every sample topic."""
    return compute_slot(policy_version, num_slots=num_slots) * shards + compute_shard(
        prompt_group_id, shards=shards
    )


def list_slot_partitions(slot: int, *, shards: int) -> range:
    """Return the partitions of a slot."""
    return range(slot * shards, (slot + 1) * shards)
