"""Objects of samples are deleted with the records that refer to them; media of prompts stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from event_samples import changed, published, rolled_out

from relax_events.events.parts import TopicOffset
from relax_events.events.types import PolicyVersionPublished, SampleRolledOut
from relax_events.objects import ObjectStore, check_in, check_out
from relax_events.objects.version_objects import (
    build_version_folder,
    delete_objects_before,
    list_stored_versions,
)
from relax_events.ops.purge import oldest_with_records
from relax_events.topics import TopicPlan

PLAN = TopicPlan("r", 1, 2, 4, 1, "none")
RETAINED = 4


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(tmp_path.as_uri())


def starts_of(version: int, offset: int) -> PolicyVersionPublished:
    partitions = PLAN.partitions_of_version(version)
    return published(
        version,
        start_offsets=[
            TopicOffset(PLAN.topic("rollout.samples"), partition, offset)
            for partition in partitions
        ],
    )


def begins_at(offset_of_version: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """Set the first offsets of each slot to those of this version."""
    return {
        (PLAN.topic("rollout.samples"), partition): offset
        for version, offset in offset_of_version.items()
        for partition in PLAN.partitions_of_version(version)
    }


def test_version_has_records_until_its_slot_starts_at_the_next_version() -> None:
    events = [starts_of(version, 10 * version) for version in range(6)]
    assert oldest_with_records(PLAN, events, begins_at({0: 0, 1: 0, 2: 0})) == 0
    assert oldest_with_records(PLAN, events, begins_at({3: 30, 1: 10, 2: 20})) == 1
    assert oldest_with_records(PLAN, events, begins_at({3: 30, 4: 39, 5: 50})) == 1, (
        "one record of version 1 is left"
    )
    assert oldest_with_records(PLAN, events, begins_at({3: 30, 4: 40, 5: 50})) == 3, (
        "the newest owners keep theirs"
    )
    one_shard_behind = begins_at({3: 30, 4: 40, 5: 50}) | {
        (PLAN.topic("rollout.samples"), PLAN.partitions_of_version(1)[-1]): 39
    }
    assert oldest_with_records(PLAN, events, one_shard_behind) == 1
    assert oldest_with_records(PLAN, [], {}) == 0
    assert oldest_with_records(PLAN, events[2:], begins_at({3: 30, 4: 40, 2: 20})) == 2
    assert oldest_with_records(PLAN, events[2:], begins_at({3: 30, 4: 40, 2: 19})) == 0, (
        "older records than those whose versions are given"
    )


def stored_sample(store: ObjectStore, version: int, *, size: int) -> SampleRolledOut:
    """Make a sample whose routed experts are in the store, as its writer does."""
    experts = np.random.default_rng(version).integers(0, 128, (3, size, 8)).astype(np.uint8)
    sample = rolled_out(f"{version:06d}-0000-0", version=version, routed_experts=experts)
    return check_in(
        sample, store, claim_check_threshold_bytes=1000, folder=build_version_folder(version)
    )


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_store_size_stays_bounded_in_a_long_run(store: ObjectStore, tmp_path: Path) -> None:
    """A step's records refer to arrays and to an image of the dataset that recurs every few steps."""
    size, largest, samples = 500, 0, {}
    images = [store.put(bytes([number]) * 1000, suffix=".png") for number in range(3)]
    for version in range(60):
        samples[version] = stored_sample(store, version, size=size)
        assert store.put(store.get(images[version % 3]), suffix=".png") == images[version % 3]
        delete_objects_before(store, version - RETAINED + 1)
        largest = max(largest, num_bytes(tmp_path))
    assert list_stored_versions(store) == [56, 57, 58, 59]
    assert largest <= (RETAINED + 1) * 3 * size * 8 + 3 * 1000
    assert [
        check_out(samples[version], store).routed_experts.shape for version in range(56, 60)
    ] == [(3, size, 8)] * 4  # type: ignore[union-attr]
    assert {store.get(image)[:1] for image in images} == {b"\0", b"\1", b"\2"}


def test_equal_arrays_are_stored_once_per_policy_version(
    store: ObjectStore,
) -> None:
    sample = rolled_out(tokens=np.arange(4, dtype=np.int32) + 1)
    one = check_in(sample, store, claim_check_threshold_bytes=8, folder=build_version_folder(3))
    same = check_in(
        changed(sample, sample_id="000000-0000-0/1"),
        store,
        claim_check_threshold_bytes=8,
        folder=build_version_folder(3),
    )
    later = check_in(sample, store, claim_check_threshold_bytes=8, folder=build_version_folder(4))
    assert one.tokens.reference == same.tokens.reference != later.tokens.reference  # type: ignore[union-attr]
    assert delete_objects_before(store, 4) == 2, "tokens, and the log-probabilities of the engine"
    assert np.asarray(check_out(later, store).tokens).tolist() == [1, 2, 3, 4]


def test_next_deletion_completes_an_interrupted_one(store: ObjectStore) -> None:
    for version in (1, 2, 3):
        store.put(b"first", folder=build_version_folder(version))
        store.put(b"second", folder=build_version_folder(version))
    store.delete(store.list(build_version_folder(1))[:1])
    assert delete_objects_before(store, 3) == 3
    assert delete_objects_before(store, 3) == 0
    assert list_stored_versions(store) == [3]
