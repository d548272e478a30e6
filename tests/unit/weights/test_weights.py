import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.weights.artifact_reader import read_weights
from relax_events.weights.artifact_writer import (
    delete_weights,
    stored_versions,
    weights_digest,
    write_weights,
)
from relax_events.weights.file_content import lay_out
from relax_events.weights.transport import StorePublisher, StoreReader

pytestmark = pytest.mark.unit


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore.open("memory://")


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model.embed.weight": torch.randn(7, 4, generator=generator),
        "model.norm.weight": torch.randn(4, generator=generator).to(torch.bfloat16),
        "lm_head.bias": torch.tensor(1.5),
    }


def test_weights_digest_covers_names_dtypes_shapes_and_bytes() -> None:
    values = np.arange(6, dtype=np.float32)
    tensors = {
        "b": torch.tensor([1], dtype=torch.int64),
        "a": torch.from_numpy(values).reshape(2, 3),
    }
    first, second = (
        blake3(b"a\0float32\0[2, 3]\0" + values.tobytes()).digest(),
        blake3(b"b\0int64\0[1]\0" + (1).to_bytes(8, "little")).digest(),
    )
    assert weights_digest(tensors) == blake3(first + second).digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"lm_head.bias": torch.tensor(1.5000001)},
        lambda tensors: tensors | {"lm_head.bias": torch.tensor([1.5])},
        lambda tensors: tensors | {"lm_head.bias": torch.tensor(1.5, dtype=torch.float64)},
        lambda tensors: {name.replace("norm", "form"): tensor for name, tensor in tensors.items()},
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if name != "lm_head.bias"
        },
    ],
)
def test_weights_digest_differs_when_anything_does(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    assert weights_digest(change(some_tensors())) != weights_digest(some_tensors())


def test_weights_digest_is_the_same_when_order_and_layout_differ() -> None:
    tensors = some_tensors()
    shuffled = {name: tensors[name] for name in sorted(tensors, reverse=True)}
    shuffled["model.embed.weight"] = tensors["model.embed.weight"].T.contiguous().T
    assert weights_digest(shuffled) == weights_digest(tensors)


@pytest.mark.parametrize("max_file_bytes", [1, 120, 10**9])
def test_read_weights_gives_back_what_was_written(store: ObjectStore, max_file_bytes: int) -> None:
    tensors = some_tensors()
    reference, digest = write_weights(
        store, tensors, policy_version=7, model_type="qwen3", max_file_bytes=max_file_bytes
    )
    weights = read_weights(store, reference)
    assert (weights.policy_version, weights.digest) == (7, digest)
    assert weights.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert weights.tensors[name].dtype == tensor.dtype
        assert torch.equal(weights.tensors[name], tensor)
    assert json.loads(store.get(reference))["model_type"] == "qwen3"
    num_files = {1: 3, 120: 2, 10**9: 1}[max_file_bytes]
    assert len(store.list("weights/00000007")) == num_files + 1


def test_write_weights_takes_tensors_that_share_memory(store: ObjectStore) -> None:
    flat = torch.arange(8.0)
    tensors = {"embed": flat[:4], "head": flat[:4], "norm": flat[4:]}
    weights = read_weights(store, write_weights(store, tensors, policy_version=1)[0])
    assert torch.equal(weights.tensors["head"], torch.tensor([0.0, 1.0, 2.0, 3.0]))


def test_write_weights_leaves_the_first_artifact_when_a_version_is_written_again(
    store: ObjectStore,
) -> None:
    first, digest = write_weights(store, some_tensors(), policy_version=2)
    write_weights(store, some_tensors() | {"lm_head.bias": torch.tensor(2.5)}, policy_version=2)
    assert read_weights(store, first).digest == digest


def test_write_weights_leaves_no_manifest_when_the_store_fails(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_unhashed = store.put_unhashed

    def refuse_second_file(key: str, data: bytes) -> ObjectRef:
        if store.list("weights"):
            raise ObjectError("the object store is full")
        return put_unhashed(key, data)

    monkeypatch.setattr(store, "put_unhashed", refuse_second_file)
    with pytest.raises(ObjectError, match="full"):
        write_weights(store, some_tensors(), policy_version=2, max_file_bytes=1)
    assert not any(key.endswith(".json") for key in store.list("weights"))


def test_read_weights_names_the_file_when_it_is_missing(store: ObjectStore) -> None:
    reference, _ = write_weights(store, some_tensors(), policy_version=2)
    lost = next(key for key in store.list("weights") if key.endswith(".safetensors"))
    store.delete([lost])
    with pytest.raises(
        WeightsError,
        match=(
            f"weights {reference.uri} can't be used: can't read {store.uri(lost)}: there is no "
            "such object"
        ),
    ):
        read_weights(store, reference)


def test_read_weights_names_the_tensor_and_the_file_when_a_bit_was_flipped(
    store: ObjectStore,
) -> None:
    reference, _ = write_weights(store, some_tensors(), policy_version=2)
    manifest, file = sorted(store.list("weights"))[::-1]
    for key, text in (
        (manifest, f"{store.uri(manifest)} was altered: its SHA-256 must be"),
        (file, rf"\S+ was altered in {store.uri(file)}: its BLAKE3 must be"),
    ):
        whole = store.get_at(key)
        store.put_at(key, whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(WeightsError, match=text):
            read_weights(store, reference)
        store.put_at(key, whole)
    read_weights(store, reference)


def test_read_weights_refuses_a_file_of_another_size(store: ObjectStore) -> None:
    reference, _ = write_weights(store, some_tensors(), policy_version=2)
    (file,) = (key for key in store.list("weights") if key.endswith(".safetensors"))
    store.put_at(file, store.get_at(file) + b" ")
    with pytest.raises(WeightsError, match="was altered: it must have"):
        read_weights(store, reference)


@pytest.mark.parametrize(
    ("alter", "text"),
    [
        (lambda manifest: manifest | {"digest": "00" * 32}, "their digest must be 0000"),
        (lambda manifest: manifest | {"format": 9}, "has format 9, this release reads 3"),
        (
            lambda manifest: {key: manifest[key] for key in manifest if key != "tensors"},
            "KeyError: 'tensors'",
        ),
        (
            lambda manifest: manifest | {"tensors": manifest["tensors"][1:]},
            r"lm_head\.bias is not in both the manifest and",
        ),
        (
            lambda manifest: (
                manifest
                | {"tensors": [manifest["tensors"][0] | {"shape": [1]}, *manifest["tensors"][1:]]}
            ),
            r"must be float32 \[1\], got float32 \[\]",
        ),
        (
            lambda manifest: manifest | {"policy_version": [[]]},
            r"expected an integer, got \[\[\]\]",
        ),
        (
            lambda manifest: manifest | {"model_type": {"deep": 1}},
            "expected a string, got {'deep': 1}",
        ),
        (
            lambda manifest: (
                manifest
                | {
                    "changed": [1],
                    "base": manifest["files"][0] | {"digest": "", "weights_digest": ""},
                }
            ),
            "expected a string, got 1",
        ),
        (
            lambda manifest: manifest | {"files": [manifest["files"][0] | {"num_bytes": "9"}]},
            "expected an integer, got 9",
        ),
        (
            lambda manifest: manifest | {"files": [manifest["files"][0] | {"uri": None}]},
            "expected a string, got None",
        ),
        (
            lambda manifest: manifest | {"tensors": [manifest["tensors"][0] | {"file": True}]},
            "expected an integer, got True",
        ),
    ],
)
def test_read_weights_explains_an_inconsistent_manifest(
    store: ObjectStore, alter: Callable[[dict[str, object]], object], text: str
) -> None:
    reference, _ = write_weights(store, some_tensors(), policy_version=2)
    altered = store.put(json.dumps(alter(json.loads(store.get(reference)))).encode())
    with pytest.raises(WeightsError, match=text):
        read_weights(store, altered)


def test_read_weights_explains_a_manifest_that_is_not_json(store: ObjectStore) -> None:
    with pytest.raises(WeightsError, match="weight manifest can't be read: JSONDecodeError"):
        read_weights(store, store.put(b"nonsense"))


def test_read_weights_explains_an_invalid_safetensors_file(store: ObjectStore) -> None:
    reference, _ = write_weights(store, some_tensors(), policy_version=2)
    manifest = json.loads(store.get(reference))
    junk = store.put(b"nonsense of more than eight bytes")
    manifest["files"][0] = {
        "uri": junk.uri,
        "num_bytes": junk.num_bytes,
    }
    with pytest.raises(WeightsError, match=r"is damaged: its header must have"):
        read_weights(store, store.put(json.dumps(manifest).encode()))


def test_delete_weights_deletes_only_the_given_versions(store: ObjectStore) -> None:
    references = [
        write_weights(store, some_tensors(), policy_version=version)[0] for version in (1, 2, 10)
    ]
    delete_weights(store, 1, 2, 3)
    assert {key.split("/")[1] for key in store.list("weights")} == {"00000010"}
    with pytest.raises(WeightsError, match="there is no such object"):
        read_weights(store, references[0])
    read_weights(store, references[2])


def test_stored_versions_includes_half_written_ones(store: ObjectStore) -> None:
    assert stored_versions(store) == []
    for version in (10, 2):
        write_weights(store, some_tensors(), policy_version=version)
    store.put_at("weights/00000007/0123456789abcdef.safetensors", b"no manifest")
    assert stored_versions(store) == [2, 7, 10]


def test_store_transport_fetches_what_it_published(store: ObjectStore) -> None:
    transport = StoreReader(store)
    publisher = StorePublisher(store)
    artifact, digest = publisher.publish(lay_out([some_tensors()]), policy_version=4)
    published = PolicyVersionPublished(
        policy_version=4, artifact=artifact, transports=["store"], start_offsets=[]
    )
    assert transport.fetch(published).digest == digest
    mislabelled = PolicyVersionPublished(
        policy_version=5, artifact=artifact, transports=["store"], start_offsets=[]
    )
    with pytest.raises(WeightsError, match="announced as policy version 5, it holds 4"):
        transport.fetch(mislabelled)
