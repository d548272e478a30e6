"""Weights written as changes to the previous version: the same bits are restored, whatever the
cache holds, and corruption is detected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax_events.errors import WeightsError
from relax_events.events.types import PolicyVersionPublished
from relax_events.model_folder.tensors import StoredTensors
from relax_events.objects import ObjectStore
from relax_events.weights.artifact_reader import CachedWeights, read_weights
from relax_events.weights.artifact_writer import (
    WrittenWeights,
    delete_weights,
    weights_digest,
    write_weights,
)
from relax_events.weights.delta import compute_delta
from relax_events.weights.file_content import lay_out
from relax_events.weights.manifest import Base, WeightManifest
from relax_events.weights.transport import StorePublisher, StoreReader

pytestmark = pytest.mark.unit
DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore.open("memory://")


def random_bits(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor of any bits at all: infinities, NaNs with any payload, zeros of both signs."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    return (
        torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def with_changes(generator: torch.Generator, tensor: Tensor, fraction: float) -> Tensor:
    new = random_bits(generator, tensor.dtype, tuple(tensor.shape))
    return torch.where(torch.rand(tensor.shape, generator=generator) < fraction, new, tensor)


def same_bits(left: Tensor, right: Tensor) -> bool:
    bits = BITS[left.element_size()]
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))
    )


def versions(
    count: int, *, fraction: float = 0.02, dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [{"embed": random_bits(generator, dtype, (64, 32)), "norm": torch.ones(32, dtype=dtype)}]
    for _ in range(count - 1):
        made.append(
            {
                "embed": with_changes(generator, made[-1]["embed"], fraction),
                "norm": made[-1]["norm"],
            }
        )
    return made


def published(
    transport: StorePublisher, weights: Iterable[dict[str, Tensor]]
) -> list[PolicyVersionPublished]:
    announced = []
    for version, tensors in enumerate(weights):
        artifact, _ = transport.publish(lay_out([tensors]), policy_version=version)
        announced.append(
            PolicyVersionPublished(
                policy_version=version, artifact=artifact, transports=["store"], start_offsets=[]
            )
        )
    return announced


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (0,), (1,), (7, 3), (2, 3, 5)]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_weight_deltas_round_trip_any_bit_pattern(
    seed: int, dtype: torch.dtype, shape: tuple[int, ...], fraction: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    store = ObjectStore.open("memory://")
    old = {"a": random_bits(generator, dtype, shape), "b": torch.arange(300.0).to(torch.bfloat16)}
    new = {"a": with_changes(generator, old["a"], fraction), "b": old["b"].clone()}
    new["b"][7] = -1.0
    base, digest = write_weights(store, old, policy_version=0)
    reference, _ = write_weights(
        store, new, policy_version=1, previous=WrittenWeights(Base(base, digest), old)
    )
    first = read_weights(store, base)
    assert isinstance(first.tensors, StoredTensors)
    for weights in (
        read_weights(store, reference),
        read_weights(store, reference, cached=CachedWeights(first.digest, first.tensors)),
    ):
        assert weights.digest == weights_digest(new)
        assert all(same_bits(weights.tensors[name], tensor) for name, tensor in new.items())
    assert all(same_bits(first.tensors[name], tensor) for name, tensor in old.items()), (
        "what is cached stays as it is"
    )


def test_weight_delta_consists_of_positions_and_values() -> None:
    old = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    new = old.clone()
    new[1, 0] = 40.0
    positions, values = compute_delta(old, new) or (None, None)
    assert (positions.tolist(), values.tolist()) == ([3], [40.0])
    assert compute_delta(old, new + 1) is None, (
        "six positions and six values are more than six values"
    )


def test_delta_versions_are_small_and_full_snapshots_recur_at_an_interval(
    store: ObjectStore,
) -> None:
    announced = published(StorePublisher(store, full_snapshot_interval=4), versions(9))
    sizes = [
        sum(file.num_bytes for file in WeightManifest.from_json(store.get(one.artifact)).files)
        for one in announced
    ]
    whole = {0, 4, 8}
    assert [
        version
        for version, one in enumerate(announced)
        if WeightManifest.from_json(store.get(one.artifact)).base is None
    ] == sorted(whole)
    assert max(size for version, size in enumerate(sizes) if version not in whole) < 0.25 * min(
        sizes[version] for version in whole
    )


@pytest.mark.parametrize("order", [range(9), [8, 2, 3, 7, 0, 6], [5, 5, 4, 5]])
@pytest.mark.parametrize("full_snapshot_interval", [1, 3, 1000])
def test_versions_can_be_fetched_in_any_order(
    store: ObjectStore, order: list[int], full_snapshot_interval: int
) -> None:
    weights = versions(9)
    announced = published(
        StorePublisher(store, full_snapshot_interval=full_snapshot_interval), weights
    )
    reader = StoreReader(store, full_snapshot_interval=full_snapshot_interval)
    for version in order:
        fetched = reader.fetch(announced[version])
        assert all(
            same_bits(fetched.tensors[name], tensor) for name, tensor in weights[version].items()
        )


def test_reader_of_consecutive_versions_fetches_only_deltas(store: ObjectStore) -> None:
    announced = published(StorePublisher(store, full_snapshot_interval=100), versions(4))
    follower = StoreReader(store, full_snapshot_interval=100)
    follower.fetch(announced[2])
    delete_weights(store, 0, 1, 2)
    assert follower.fetch(announced[3]).policy_version == 3
    with pytest.raises(WeightsError, match="weights/00000002/manifest"):
        StoreReader(store, full_snapshot_interval=100).fetch(announced[3])


def test_reader_detects_altered_cached_weights_and_reads_them_again(
    store: ObjectStore,
) -> None:
    weights = versions(3)
    announced = published(StorePublisher(store, full_snapshot_interval=100), weights)
    reader = StoreReader(store, full_snapshot_interval=100)
    fetched = reader.fetch(announced[1])
    fetched.tensors["norm"][0] = 3.0  # an engine that trains on its weights
    assert same_bits(reader.fetch(announced[2]).tensors["norm"], weights[2]["norm"])


def test_new_reshaped_and_recast_tensors_are_written_in_full(store: ObjectStore) -> None:
    old = {
        "a": torch.zeros(100),
        "b": torch.zeros(100),
        "c": torch.zeros(100),
        "gone": torch.zeros(3),
    }
    base, digest = write_weights(store, old, policy_version=1)
    new = {
        "a": torch.zeros(100, dtype=torch.bfloat16),
        "b": torch.zeros(10, 10),
        "c": torch.zeros(100),
        "new": torch.ones(2),
    }
    reference, _ = write_weights(
        store, new, policy_version=2, previous=WrittenWeights(Base(base, digest), old)
    )
    assert WeightManifest.from_json(store.get(reference)).changed == {"c"}
    assert all(
        same_bits(read_weights(store, reference).tensors[name], tensor)
        for name, tensor in new.items()
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"a@positions": torch.tensor([100], dtype=torch.int32)},
            "a has changes at positions 100 to 100 of 100",
        ),
        (
            {"a@positions": torch.tensor([-1], dtype=torch.int32)},
            "a has changes at positions -1 to -1 of 100",
        ),
        (
            {"a@positions": torch.tensor([1, 2, 3], dtype=torch.int32)},
            "a has 3 changed positions and 4 bytes of values",
        ),
        ({"a@positions": torch.tensor([1.0])}, "a can't be changed"),
        ({"a@values": torch.tensor([9.0])}, "a was altered in"),
        (
            {"a@values": torch.tensor([9.0], dtype=torch.float64)},
            "a has changes at|a was altered in",
        ),
    ],
)
def test_invalid_weight_delta_is_rejected(
    store: ObjectStore, wrong: dict[str, Tensor], says: str
) -> None:
    import safetensors.torch

    old = {"a": torch.zeros(100)}
    base, digest = write_weights(store, old, policy_version=1)
    new = {"a": old["a"].index_fill(0, torch.tensor([5]), 1.0)}
    reference, _ = write_weights(
        store, new, policy_version=2, previous=WrittenWeights(Base(base, digest), old)
    )
    value = json.loads(store.get(reference))
    right = {"a@positions": torch.tensor([5], dtype=torch.int32), "a@values": torch.tensor([1.0])}
    altered = store.put(safetensors.torch.save(right | wrong))
    value["files"] = [
        {"uri": altered.uri, "digest": altered.digest.hex(), "num_bytes": altered.num_bytes}
    ]
    with pytest.raises(WeightsError, match=says):
        read_weights(store, store.put(json.dumps(value).encode()))


def test_cyclic_delta_versions_are_rejected(store: ObjectStore) -> None:
    old = {"a": torch.zeros(100)}
    base, digest = write_weights(store, old, policy_version=5)
    reference, _ = write_weights(
        store, old, policy_version=5, previous=WrittenWeights(Base(base, digest), old)
    )
    with pytest.raises(
        WeightsError, match="policy version 5 is a delta to version 5, which is not older"
    ):
        read_weights(store, reference)


def test_manifest_format_of_a_full_snapshot_is_unchanged(store: ObjectStore) -> None:
    reference, _ = write_weights(store, {"a": torch.zeros(2)}, policy_version=1)
    assert sorted(json.loads(store.get(reference))) == [
        "digest",
        "files",
        "format",
        "model_type",
        "policy_version",
        "tensors",
    ]
    assert sha256(store.get(reference)).hexdigest()[:16] in reference.uri
