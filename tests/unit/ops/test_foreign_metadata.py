"""A foreign `.metadata` is read without importing or calling what it names."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from relax_events.attacks.checkpoints import metadata_pickles
from relax_events.errors import ConfigError
from relax_events.packages.megatron.foreign_checkpoint import metadata as reading
from relax_events.packages.megatron.foreign_checkpoint.metadata import read_metadata

ATTACKS = sorted(metadata_pickles(Path("canary")))


def make_metadata() -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4, 3]), [chunk])
    return Metadata(
        {"w": tensor, "extra": BytesStorageMetadata()},
        planner_data={"w": ("model", "w", 0)},
        storage_data={
            MetadataIndex("w", torch.Size([2, 0]), 1): _StorageInfo("__0_0.distcp", 10, 20),
            MetadataIndex("extra"): _StorageInfo("__0_0.distcp", 30, 5),
        },
    )


def write(folder: Path, metadata: Any, protocol: int = 4) -> Path:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    return folder


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_torch_is_read_as_torch_reads_it(tmp_path: Path, protocol: int) -> None:
    wrote = make_metadata()
    read = read_metadata(write(tmp_path, wrote, protocol))
    assert read.state_dict_metadata == wrote.state_dict_metadata
    assert read.storage_data == wrote.storage_data
    assert [index.index for index in read.storage_data] == [1, None]


@pytest.mark.parametrize("attack", ATTACKS)
def test_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path, attack: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / ".metadata").write_bytes(metadata_pickles(canary)[attack])
    before = {**vars(Metadata)}, dict(copyreg.dispatch_table)
    with pytest.raises(ConfigError, match=r"\.metadata can't be read: "):
        read_metadata(tmp_path)
    assert not canary.exists()
    assert ({**vars(Metadata)}, dict(copyreg.dispatch_table)) == before


def test_standard_unpickler_would_run_the_attack(tmp_path: Path) -> None:
    pickle.loads(metadata_pickles(tmp_path / "canary")["os.system"])
    assert (tmp_path / "canary").exists()


def place(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, stored in metadata.storage_data.items():
            metadata.storage_data[index] = replace(stored, **changes)

    return change


def tensor(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"] = replace(metadata.state_dict_metadata["w"], **changes)

    return change


def chunk(offsets: Any, sizes: Any) -> Callable[[Metadata], None]:
    return tensor(chunks=[ChunkStorageMetadata(offsets, sizes)])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (place(relative_path="../secret"), "'../secret', which is not directly in"),
        (place(relative_path="/etc/passwd"), "'/etc/passwd', which is not directly in"),
        (place(relative_path=""), "'', which is not directly in"),
        (place(relative_path=".."), "'..', which is not directly in"),
        (place(relative_path="a\0b"), "which is not directly in"),
        (place(relative_path=5), "a file's name is an object of int"),
        (place(offset=-1), "must be between 0 and"),
        (place(length=1 << 63), "must be between 0 and"),
        (place(length=1.5), "an object of float and not of int"),
        (place(offset=True), "an object of bool and not of int"),
        (place(transform_descriptors=["zstd"]), "stream extension"),
        (tensor(size=[4, 3]), "the size of w is an object of list and not of tuple"),
        (tensor(size=torch.Size([1] * 17)), "17 dimensions"),
        (tensor(properties=None), "the properties of w is an object of NoneType"),
        (tensor(chunks=()), "the chunks of w is an object of tuple"),
        (chunk(torch.Size([3, 0]), torch.Size([2, 3])), "lies outside of"),
        (chunk(torch.Size([0]), torch.Size([2, 3])), "lies outside of"),
        (chunk(torch.Size([0, 0]), None), "an object of NoneType"),
        (lambda metadata: setattr(metadata, "storage_data", None), "storage_data is an object"),
        (lambda metadata: metadata.state_dict_metadata.update({7: None}), "an entry's name"),
    ],
)  # fmt: skip
def test_metadata_with_a_wrong_field_is_refused(
    tmp_path: Path, change: Callable[[Metadata], None], expected: str
) -> None:
    metadata = make_metadata()
    change(metadata)
    with pytest.raises(ConfigError, match=expected):
        read_metadata(write(tmp_path, metadata))


def test_metadata_of_many_shared_chunks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_CHUNKS", 1000)
    metadata = make_metadata()
    entry = metadata.state_dict_metadata["w"]
    metadata.state_dict_metadata = {
        str(i): replace(entry, chunks=entry.chunks * 50) for i in range(50)
    }
    with pytest.raises(ConfigError, match="more than 1000 chunks"):
        read_metadata(write(tmp_path, metadata))


def test_metadata_beyond_the_bound_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_METADATA_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_metadata(write(tmp_path, make_metadata()))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.metadata can't be read: .*No such file"):
        read_metadata(tmp_path)
