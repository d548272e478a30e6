"""Files of a version in memory, and their headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from relax_events.errors import ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.model_folder.tensors import split_file
from relax_events.objects import ObjectStore
from relax_events.weights.artifact_reader import read_weights
from relax_events.weights.artifact_writer import write_files
from relax_events.weights.file_content import FileContent, all_tensors, lay_out
from relax_events.weights.reused_memory import ReusedMemory
from relax_events.weights.transport import StorePublisher

pytestmark = pytest.mark.unit
TENSORS = {
    "a": torch.tensor([True, False, True]),
    "b": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3),
    "c": torch.tensor(1.5, dtype=torch.float64),
    "d": torch.empty(0, 4),
}


def test_file_is_a_safetensors_file() -> None:
    file = FileContent.of(TENSORS)
    loaded = load(bytes(file.content))
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(file.tensors[name], tensor)
    split = split_file(file.content, "f")
    assert {name: raw.layout for name, raw in split.items()} == file.layouts


def test_file_does_not_change_with_its_tensors() -> None:
    weight = torch.zeros(3)
    file = FileContent.of({"w": weight})
    weight += 1
    assert file.tensors["w"].tolist() == [0, 0, 0]


def test_files_that_need_not_stay_share_the_memory_of_the_largest() -> None:
    parts = [{"a": torch.zeros(300)}, {"b": torch.ones(9)}, {}, {"c": torch.ones(300)}]
    places = [file.memory.data_ptr() for file in lay_out(parts, keep=False)]
    assert places == places[:1] * 3
    held = list(lay_out(parts))
    assert len({file.memory.data_ptr() for file in held}) == 3
    assert all_tensors(held).keys() == {"a", "b", "c"}


def test_version_that_is_written_part_by_part_is_read_whole(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    parts = [{"b": torch.ones(5), "c": torch.zeros(2)}, {"a": torch.arange(300.0)}]
    reference, digest = write_files(store, lay_out(parts, keep=False), policy_version=1)
    weights = read_weights(store, reference)
    assert weights.digest == digest
    store.delete(store.list("weights"))
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(weights.tensors[name], tensor), "a mapped file stays"


def test_buffer_of_an_object_is_refused_when_the_object_has_another_size(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    reference = store.put_at("a", b"12345")
    assert bytes(store.get_buffer(reference)) == b"12345"
    assert bytes(store.get_buffer(store.put_at("empty", b""))) == b""
    with pytest.raises(ObjectError, match="must have 4 bytes, got 5"):
        store.get_buffer(ObjectRef(reference.uri, b"", 4))
    with pytest.raises(ObjectError, match="its SHA-256 must be"):
        store.get_buffer(ObjectRef(reference.uri, bytes(32), 5))
    with pytest.raises(ObjectError, match="there is no such object"):
        store.get_buffer(ObjectRef(store.uri("b"), b"", 5))


def version_parts(value: float) -> list[dict[str, torch.Tensor]]:
    return [{"a": torch.full((300,), value)}, {"b": torch.full((90,), value)}]


def places_of(files: list[FileContent]) -> set[int]:
    return {file.memory.data_ptr() for file in files}


def test_next_version_is_laid_out_in_the_memory_of_one_that_nothing_uses_any_more() -> None:
    lender = ReusedMemory()
    first = list(lay_out(version_parts(1), lender=lender))
    places, sizes = places_of(first), sum(len(file.memory) for file in first)
    assert lender.num_free_bytes == 0
    view = all_tensors(first)["b"][7:]
    del first
    assert lender.num_free_bytes < sizes, "a tensor still shares the second file"
    second = list(lay_out(version_parts(2), lender=lender))
    assert len(places & places_of(second)) == 1
    assert set(view.tolist()) == {1}
    del second, view
    third = list(lay_out(version_parts(3), lender=lender))
    assert len(places & places_of(third)) == 1
    content = third[0].content[8:]
    del third
    assert lender.num_free_bytes < sizes, "a buffer still shares the first file"
    assert len(content)


def test_memory_that_a_version_had_no_use_for_is_not_held() -> None:
    lender = ReusedMemory()
    files = [list(lay_out(version_parts(value), lender=lender)) for value in (1, 2)]
    size = sum(len(file.memory) for file in files[0])
    files.clear()
    assert lender.num_free_bytes == 2 * size
    held = list(lay_out(version_parts(3), lender=lender))
    assert lender.num_free_bytes == 0
    del held
    assert lender.num_free_bytes == size
    sizes = [len(file.memory) for file in lay_out(version_parts(4), keep=False, lender=lender)]
    assert lender.num_free_bytes == max(sizes) < size


@pytest.mark.parametrize("full_snapshot_interval", [1, 3])
def test_versions_in_reused_memory_are_read_as_they_were_published(
    tmp_path: Path, full_snapshot_interval: int
) -> None:
    store, lender = ObjectStore.open(tmp_path.as_uri()), ReusedMemory()
    publisher = StorePublisher(store, full_snapshot_interval=full_snapshot_interval)
    weights = {"a": torch.arange(900.0), "b": torch.ones(30, 40)}
    published, places = [], []
    for version in range(6):
        weights["b"][version] = -version
        parts: list[dict[str, torch.Tensor]] = [{name: weights[name]} for name in weights]
        held = list(lay_out(parts, lender=lender))
        places.append(places_of(held))
        published.append(publisher.publish(held, policy_version=version))
        del held
    for version, (artifact, digest) in enumerate(published):
        read = read_weights(store, artifact)
        assert read.digest == digest
        tensors = {name: read.tensors[name] for name in weights}
        assert torch.equal(tensors["a"], weights["a"])
        assert tensors["b"][:, 0].tolist() == [-float(row) for row in range(version + 1)] + [
            1.0
        ] * (29 - version)
    assert len(set.union(*places)) <= 2 * (2 if full_snapshot_interval > 1 else 1)
