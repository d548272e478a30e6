"""Builds torch's metadata from the records of a foreign `.metadata`, after checks of each field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from relax_events.api.errors import ConfigError
from relax_events.packages.megatron.foreign_checkpoint.records import (
    BytesRecord,
    ChunkRecord,
    IndexRecord,
    MetadataRecord,
    PropertiesRecord,
    Record,
    StorageRecord,
    TensorRecord,
    read_records,
)
from relax_events.regular_files import open_regular

MAX_METADATA_BYTES = 256 << 20
"""A checkpoint of 1 T parameters with optimizer needs about a tenth."""
MAX_CHUNKS = 1 << 22
"""Of all tensors together: references in a pickle are short, and one list may stand in many."""
MAX_DIMS = 16
MAX_SIZE = (1 << 63) - 1


def read_metadata(folder: Path) -> Metadata:
    """Read the `.metadata` of a distributed checkpoint without calling the functions that it names.

    Raises:
        ConfigError: It is missing, too large, or differs from torch's form; the text says where.
    """
    path = folder / ".metadata"
    try:
        with open_regular(path) as file:
            content = file.read(MAX_METADATA_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}; copy the checkpoint again") from error
    if len(content) > MAX_METADATA_BYTES:
        raise ConfigError(
            f"{path} has more than {MAX_METADATA_BYTES} bytes; write the checkpoint with fewer "
            "chunks"
        )
    try:
        return _build(read_records(content))
    except ConfigError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


def _build(record: MetadataRecord) -> Metadata:
    entries = _require(record.read_field("state_dict_metadata"), dict, "state_dict_metadata")
    stored = _require(record.read_field("storage_data"), dict, "storage_data")
    budget = iter(range(MAX_CHUNKS))
    return Metadata(
        state_dict_metadata={
            _require(name, str, "an entry's name"): _build_entry(name, entry, budget)
            for name, entry in entries.items()
        },
        storage_data={_build_index(index): _build_storage(at) for index, at in stored.items()},
    )


def _build_entry(
    name: str, entry: Any, budget: Iterator[int]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, BytesRecord):
        return BytesStorageMetadata()
    tensor = _require(entry, TensorRecord, f"entry {name}")
    size = _read_sizes(tensor.read_field("size"), f"the size of {name}")
    chunks = _require(tensor.read_field("chunks"), list, f"the chunks of {name}")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_read_dtype(tensor, name)),
        size=size,
        chunks=[_build_chunk(name, chunk, size, budget) for chunk in chunks],
    )


def _read_dtype(tensor: Record, name: str) -> torch.dtype:
    properties = _require(
        tensor.read_field("properties"), PropertiesRecord, f"the properties of {name}"
    )
    state = _require(properties.state, tuple, f"the properties of {name}")
    dtype: torch.dtype = _require(state[0] if state else None, torch.dtype, f"the dtype of {name}")
    return dtype


def _build_chunk(
    name: str, chunk: Any, size: torch.Size, budget: Iterator[int]
) -> ChunkStorageMetadata:
    if next(budget, None) is None:
        raise ConfigError(
            f"its tensors have more than {MAX_CHUNKS} chunks; write the checkpoint with fewer"
        )
    record = _require(chunk, ChunkRecord, f"a chunk of {name}")
    offsets = _read_sizes(record.read_field("offsets"), f"an offset in {name}")
    sizes = _read_sizes(record.read_field("sizes"), f"a chunk's size in {name}")
    if not len(offsets) == len(sizes) == len(size) or any(
        start + length > whole for start, length, whole in zip(offsets, sizes, size, strict=True)
    ):
        raise ConfigError(
            f"a chunk of {name} at {tuple(offsets)} with the size {tuple(sizes)} lies outside of "
            f"the tensor's {tuple(size)}; copy the checkpoint again"
        )
    return ChunkStorageMetadata(offsets=offsets, sizes=sizes)


def _build_index(record: Any) -> MetadataIndex:
    index = _require(record, IndexRecord, "a key of storage_data")
    name = _require(index.read_field("fqn"), str, "the name in a key of storage_data")
    offset, hint = index.read_field("offset"), index.read_field("index")
    return MetadataIndex(
        name,
        None if offset is None else _read_sizes(offset, f"an offset in {name}"),
        None if hint is None else _read_count(hint, f"an index in {name}"),
    )


def _build_storage(record: Any) -> _StorageInfo:
    storage = _require(record, StorageRecord, "a value of storage_data")
    name = _require(storage.read_field("relative_path"), str, "a file's name")
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise ConfigError(
            f"it names the file {name!r:.200}, which is not directly in the checkpoint's folder; "
            "write the checkpoint again by torch"
        )
    if storage.read_field("transform_descriptors"):
        raise ConfigError(
            f"{name} is stored through a stream extension, which is not read; write the checkpoint "
            "again without extensions"
        )
    return _StorageInfo(
        name,
        _read_count(storage.read_field("offset"), f"an offset in {name}"),
        _read_count(storage.read_field("length"), f"a length in {name}"),
    )


def _read_sizes(value: Any, what: str) -> torch.Size:
    sizes = _require(value, tuple, what)
    if len(sizes) > MAX_DIMS:
        raise ConfigError(f"{what} has {len(sizes)} dimensions, more than {MAX_DIMS}")
    return torch.Size([_read_count(size, what) for size in sizes])


def _read_count(value: Any, what: str) -> int:
    count: int = _require(value, int, what)
    if not 0 <= count <= MAX_SIZE:
        raise ConfigError(f"{what} is {count}, and it must be between 0 and {MAX_SIZE}")
    return count


def _require(value: Any, kind: type, what: str) -> Any:
    """Return a value of exactly this class."""
    if type(value) is not kind:
        raise ConfigError(
            f"{what} is an object of {type(value).__name__} and not of {kind.__name__}; copy the "
            "checkpoint again"
        )
    return value
