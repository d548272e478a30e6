"""Reads the pickle in a distributed checkpoint's `.metadata` into records that do nothing.

A pickle names classes and functions, and the standard unpickler imports and calls any. This one
knows the few names that torch writes there. It replaces each class by a record that only keeps its
arguments and its state, so nothing of a library is called or changed.

Source: the layout is that of `torch.distributed.checkpoint.FileSystemWriter`. torch reads it by
`pickle.load` (pytorch#189308, pytorch#195600).
"""

from __future__ import annotations

import io
import pickle  # the names that it may import are listed below
import pickletools
from collections.abc import Mapping
from typing import Any, Self

import torch

from relax_events.api.errors import ConfigError

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
OPCODES = frozenset(
    [
        *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    ]
)
MEMO_OPCODES = frozenset(["BINPUT", "LONG_BINPUT"])


class Record:
    """An object of the pickle: the arguments of its class, and its state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Self:
        """Keep the arguments; the unpickler calls this in place of the class."""
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def read_field(self, name: str) -> Any:
        """Return an attribute of the state; None if the state lacks it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class MetadataRecord(Record):
    """`Metadata`: everything in the file."""


class TensorRecord(Record):
    """`TensorStorageMetadata`: dtype, shape and chunks of a tensor."""


class BytesRecord(Record):
    """`BytesStorageMetadata`: an entry that is no tensor."""


class ChunkRecord(Record):
    """`ChunkStorageMetadata`: a part of a tensor."""


class PropertiesRecord(Record):
    """`TensorProperties`; its state begins with the dtype."""


class IndexRecord(Record):
    """`MetadataIndex`: the key of a chunk."""


class StorageRecord(Record):
    """`_StorageInfo`: the bytes of a file that hold a chunk."""


class IgnoredRecord(Record):
    """An object that loading does not need."""


OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
"""Of the properties until torch 2.2."""
PLANNER_MODULE = "torch.distributed.checkpoint.planner"
KNOWN: Mapping[tuple[str, str], Any] = {
    (METADATA_MODULE, "Metadata"): MetadataRecord,
    (METADATA_MODULE, "TensorStorageMetadata"): TensorRecord,
    (METADATA_MODULE, "BytesStorageMetadata"): BytesRecord,
    (METADATA_MODULE, "ChunkStorageMetadata"): ChunkRecord,
    (METADATA_MODULE, "TensorProperties"): PropertiesRecord,
    (METADATA_MODULE, "MetadataIndex"): IndexRecord,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageRecord,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): IgnoredRecord,
    (METADATA_MODULE, "StorageMeta"): IgnoredRecord,
    (OLD_MODULE, "TensorProperties"): PropertiesRecord,
    (OLD_MODULE, "MEM_FORMAT_ENCODING"): IgnoredRecord,
    (PLANNER_MODULE, "SavePlan"): IgnoredRecord,
    (PLANNER_MODULE, "WriteItem"): IgnoredRecord,
    (PLANNER_MODULE, "WriteItemType"): IgnoredRecord,
    (PLANNER_MODULE, "TensorWriteData"): IgnoredRecord,
    ("torch.serialization", "_get_layout"): IgnoredRecord,
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
} | {
    ("torch", name): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout)
}


class _RecordReader(pickle.Unpickler):
    """Makes records, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the record that stands for a class; called by the unpickler."""
        try:
            return KNOWN[module, name]
        except KeyError:
            raise ConfigError(
                f"it names {module}.{name}, and only the classes of torch's own metadata are read; "
                "don't load this checkpoint, or write it again by torch"
            ) from None


def read_records(content: bytes) -> MetadataRecord:
    """Return the metadata in a pickle.

    Raises:
        ConfigError: It is no pickle, names something else than the classes of torch's metadata, or
            uses an opcode that torch does not write there; the text lacks the file's name.
    """
    try:
        _check_opcodes(content)
        metadata = _RecordReader(io.BytesIO(content)).load()
    except ConfigError:
        raise
    except Exception as error:  # an unpickler raises errors of any class on bytes of no pickle
        raise ConfigError(
            f"it is not the metadata of a distributed checkpoint ({type(error).__name__}: {error});"
            " copy the checkpoint again"
        ) from error
    if not isinstance(metadata, MetadataRecord):
        raise ConfigError(
            f"it holds an object of {type(metadata).__name__} and not torch's Metadata; give the "
            "folder of a distributed checkpoint"
        )
    return metadata


def _check_opcodes(content: bytes) -> None:
    """Refuse opcodes that metadata lacks, and memo indices that only cost memory."""
    for count, (opcode, argument, position) in enumerate(pickletools.genops(content)):
        sparse = opcode.name in MEMO_OPCODES and isinstance(argument, int) and argument > count
        if opcode.name not in OPCODES or sparse:
            raise ConfigError(
                f"its pickle has opcode {opcode.name} at byte {position}, which torch does not "
                "write there; don't load this checkpoint, or write it again by torch"
            )
