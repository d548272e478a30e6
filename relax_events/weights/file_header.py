"""Reads the header of a safetensors file in memory. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from relax_events.errors import WeightsError

HEADER_LENGTH_BYTES = 8
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""Names of dtypes in safetensors files, and torch's."""
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "C64": 8, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
"""Bytes of an element, by the dtype's name in safetensors files."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored in a file: a part of the file's memory, or bytes of its own."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray | memoryview


def split_file(content: memoryview) -> dict[str, RawTensor]:
    """Return the tensors of a safetensors file by name, without a copy.

    Args:
        content: The whole file; writable.
    Raises:
        WeightsError: It is no safetensors file, or a tensor lies outside of it.
    """
    try:
        start = HEADER_LENGTH_BYTES + int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
        header = json.loads(bytes(content[HEADER_LENGTH_BYTES:start]))
        header.pop("__metadata__", None)
        return {name: _tensor(name, value, content[start:]) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"the header of a safetensors file can't be read: {type(error).__name__}: {error}"
        ) from error


def _tensor(name: str, value: Mapping[str, Any], values: memoryview) -> RawTensor:
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name} has the shape {shape} at bytes {begin} to {end}")
    wanted = prod(shape) * ITEM_BYTES[value["dtype"]]
    if not begin <= end <= len(values) or end - begin != wanted:
        raise ValueError(
            f"{name} lies at bytes {begin} to {end} of {len(values)}, and must have {wanted}"
        )
    return RawTensor(DTYPES[value["dtype"]], shape, values[begin:end])
