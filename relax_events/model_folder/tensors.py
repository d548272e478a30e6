"""Safetensors files, and which files of a model folder hold its weights: the only module that reads
or renders their headers and indexes (docs/adr/0047).

Imports torch only to hand out a tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from relax_events.errors import ConfigError, DamagedTensors
from relax_events.regular_files import open_regular, read_regular_text

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_FILES = "*.safetensors"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""As the library safetensors has it."""
MAX_DIMENSIONS = 64
"""As torch has it."""
ALIGNMENT_BYTES = 8
"""Tensors start at a multiple of this, so the header is padded with spaces."""
METADATA = "__metadata__"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""Torch's names of the dtypes in safetensors files."""
STORED_DTYPES = {name: stored for stored, name in DTYPES.items()}
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "complex64": 8, "bool": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Dtype, named as torch does, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored in a file: a part of the file's memory, or bytes of its own."""

    layout: TensorLayout
    data: bytearray | memoryview


class StoredTensors(Mapping[str, "Tensor"]):
    """Tensors by name, each created on access over the bytes of its file, without a copy.

    Files of this machine stay mapped: deleting one does not disturb its reader.
    """

    def __init__(self, raw: Mapping[str, RawTensor]) -> None:
        self.raw = raw

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Map the weights of a model folder.

        Raises:
            ConfigError: As `require_layouts`.
        """
        return cls(_require_weights(folder, mmap.ACCESS_COPY))

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Self:
        """Map the tensors of files.

        Raises:
            DamagedTensors: A file is missing or damaged; the text names it.
        """
        parts = (_read_file(file, mmap.ACCESS_COPY) for file in files)
        return cls({name: raw for part in parts for name, raw in part.items()})

    @cached_property
    def layouts(self) -> dict[str, TensorLayout]:
        """Dtype and shape of each tensor."""
        return {name: raw.layout for name, raw in self.raw.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of its file."""
        return self[name]

    def __getitem__(self, name: str) -> Tensor:
        import torch

        raw = self.raw[name]
        dtype = getattr(torch, raw.layout.dtype)
        if not raw.data:
            return torch.empty(raw.layout.shape, dtype=dtype)
        return torch.frombuffer(raw.data, dtype=dtype).reshape(raw.layout.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files of a model folder's weights: `model.safetensors`, or the files that its
    index names; none if it has neither.

    Raises:
        DamagedTensors: The index can't be read, or names a file that the folder does not hold.
    """
    return [folder / name for name in _list_files(folder)]


def read_layouts(folder: Path) -> dict[str, TensorLayout]:
    """Return dtype and shape of each tensor of a model folder, from the headers of its files; none
    if the folder has no weights.

    Raises:
        DamagedTensors: A file or the index is damaged; the text names it.
    """
    return {name: raw.layout for name, raw in _read_folder(folder, mmap.ACCESS_READ).items()}


def require_layouts(folder: Path) -> dict[str, TensorLayout]:
    """Return dtype and shape of each tensor of a model folder.

    Raises:
        ConfigError: The folder has no weights.
        DamagedTensors: A file or the index is damaged; the text names it.
    """
    return {name: raw.layout for name, raw in _require_weights(folder, mmap.ACCESS_READ).items()}


def _require_weights(folder: Path, access: int) -> dict[str, RawTensor]:
    if tensors := _read_folder(folder, access):
        return tensors
    raise ConfigError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert the weights to "
        "safetensors (no other format is read)"
    )


def _read_folder(folder: Path, access: int) -> dict[str, RawTensor]:
    files = _list_files(folder)
    parts = {name: _read_file(folder / name, access) for name in files}
    tensors = {name: raw for part in parts.values() for name, raw in part.items()}
    for file, names in files.items():
        if missing := sorted(names - parts[file].keys()):
            raise DamagedTensors(
                folder / INDEX_FILE, f"it names tensor {missing[0]}, which {file} must hold"
            )
        tensors |= {name: parts[file][name] for name in names}
    return tensors


def _list_files(folder: Path) -> dict[str, set[str]]:
    """Return the files of a folder's weights, each with its tensors according to the index."""
    if (folder / SINGLE_FILE).is_file():
        return {SINGLE_FILE: set()}
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    files: dict[str, set[str]] = {}
    try:
        for tensor, file in orjson.loads(read_regular_text(path))["weight_map"].items():
            files.setdefault(str(file), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedTensors(
            path, f"it must hold a weight_map ({type(error).__name__}: {error})"
        ) from None
    for name in files:
        if "/" in name or not name.endswith(".safetensors"):
            raise DamagedTensors(path, f"it must name files of its folder, got {name!r}")
        if not (folder / name).is_file():
            raise DamagedTensors(path, f"it names {name}, which the folder must hold")
    return dict(sorted(files.items()))


def _read_file(path: Path, access: int) -> dict[str, RawTensor]:
    try:
        with open_regular(path) as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=access))
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise DamagedTensors(path, f"it can't be read ({error})") from None
    return split_file(content, path)


def split_file(content: memoryview, file: Path | str) -> dict[str, RawTensor]:
    """Return the tensors of a safetensors file by name, without a copy.

    Args:
        content: The whole file; writable, if tensors are to be created over it.
        file: Names the file in an error.
    Raises:
        DamagedTensors: The header is longer than the file or than 100 MB, is not JSON, or does
            not describe tensors that lie one behind the other and fill the file.
    """
    length = int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
    longest = min(len(content) - HEADER_LENGTH_BYTES, MAX_HEADER_BYTES)
    if not 0 < length <= longest:
        raise DamagedTensors(
            file, f"its header must have 1 to {max(longest, 0):,} bytes, got {length:,}"
        )
    start = HEADER_LENGTH_BYTES + length
    try:
        header: Any = orjson.loads(content[HEADER_LENGTH_BYTES:start])
    except ValueError as error:
        raise DamagedTensors(file, f"its header must be JSON ({error})") from None
    if not isinstance(header, dict):
        raise DamagedTensors(file, f"its header must be a JSON object, got {header!r:.40}")
    header.pop(METADATA, None)
    try:
        return _split_values(header, content[start:])
    except (KeyError, TypeError) as error:
        raise DamagedTensors(
            file,
            "its header must give dtype, shape and data_offsets of each tensor "
            f"({type(error).__name__}: {error})",
        ) from None
    except ValueError as error:
        raise DamagedTensors(file, str(error)) from None


def _split_values(header: Mapping[str, Any], values: memoryview) -> dict[str, RawTensor]:
    """Return the tensors that a header describes.

    Raises:
        KeyError, TypeError, ValueError: A tensor lacks a property, or breaks a rule.
    """
    spans = {name: _read_span(name, entry) for name, entry in header.items()}
    position = 0
    for name, (_, begin, end) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if begin != position:
            raise ValueError(
                f"tensor {name} must begin at byte {position:,}, where the one before it ends, "
                f"got {begin:,}"
            )
        position = end
    if position != len(values):
        raise ValueError(
            f"its tensors must have {len(values):,} bytes, as many as follow the header, got "
            f"{position:,}"
        )
    return {
        name: RawTensor(layout, values[begin:end]) for name, (layout, begin, end) in spans.items()
    }


def _read_span(name: str, entry: Mapping[str, Any]) -> tuple[TensorLayout, int, int]:
    """Return a tensor's layout, and where its values begin and end."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(
            f"shape and offsets of tensor {name} must be whole numbers from 0, got {list(shape)} "
            f"and {[begin, end]}"
        )
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"tensor {name} must have at most {MAX_DIMENSIONS} dimensions, got {len(shape):,}"
        )
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype of tensor {name} must be known, got {entry['dtype']!r}")
    layout = TensorLayout(DTYPES[entry["dtype"]], shape)
    if end - begin != layout.num_bytes:
        raise ValueError(
            f"tensor {name} must have {layout.num_bytes:,} bytes as {layout}, its offsets are "
            f"{begin:,} and {end:,}"
        )
    return layout, begin, end


def render_header(layouts: Mapping[str, TensorLayout]) -> bytes:
    """Return what a safetensors file has before its tensors.

    Args:
        layouts: The tensors, in the order of the file.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, layout in layouts.items():
        begin, end = end, end + layout.num_bytes
        header[name] = {
            "dtype": STORED_DTYPES[layout.dtype],
            "shape": list(layout.shape),
            "data_offsets": [begin, end],
        }
    text = orjson.dumps(header)
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text


def render_index(files: Mapping[str, Mapping[str, TensorLayout]]) -> bytes:
    """Return the index of a model folder with several files of weights.

    Args:
        files: The tensors of each file, by its name.
    """
    total = sum(layout.num_bytes for layouts in files.values() for layout in layouts.values())
    holders = {name: file for file, layouts in files.items() for name in layouts}
    index = {"metadata": {"total_size": total}, "weight_map": holders}
    return orjson.dumps(index, option=orjson.OPT_INDENT_2)
