"""The policy-version ring: each version owns a slot, each slot has the same number of partitions
(shards).
"""

from __future__ import annotations

import zlib


def num_slots(max_staleness: int) -> int:
    """Return how many slots the ring has.

    The window holds `max_staleness + 1` versions. One slot more lets the next version's records be
    written while late records of the version that left the window are still being told apart.
    """
    return max_staleness + 2


def slot_of(policy_version: int, *, num_slots: int) -> int:
    """Return the slot that the version owns."""
    return policy_version % num_slots


def shard_of(prompt_group_id: str, *, shards: int) -> int:
    """Return the shard of a prompt group: the same in every topic, for every version."""
    return zlib.crc32(prompt_group_id.encode()) % shards


def partition_of(prompt_group_id: str, policy_version: int, *, num_slots: int, shards: int) -> int:
    """Return the Kafka partition in which all records of the prompt group's samples lie, on every
    sample topic alike.
    """
    return slot_of(policy_version, num_slots=num_slots) * shards + shard_of(
        prompt_group_id, shards=shards
    )


def partitions_of_slot(slot: int, *, shards: int) -> range:
    """Return the partitions of a slot."""
    return range(slot * shards, (slot + 1) * shards)
