"""Numeric arrays as little-endian bytes with dtype and shape: a hundred times faster than Avro
arrays, decoded as views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Array, ObjectRef, StoredArray

DTYPES = {
    name: np.dtype(name)
    for name in ("|u1", "|i1", "|b1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
}

MIN_RUN_VALUES, MAX_RUN_BYTES = 1024, 8 << 20
"""Arrays of so many values, and of so many bytes, may be packed as runs: masks and equal advantages
of long samples. A few bytes on the log can't become any number of values."""
RUN_DTYPE = np.dtype("<i4")
NO_RUNS: Mapping[str, None] = {"run_lengths": None}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(array: Array) -> dict[str, Any]:
    """Return the PackedTensor record of an array."""
    if isinstance(array, StoredArray):
        reference = array.reference
        stored = {
            "uri": reference.uri,
            "digest": reference.digest,
            "num_bytes": reference.num_bytes,
        }
        parts: dict[str, Any] = {"dtype": array.dtype, "shape": list(array.shape), "data": None}
        return {**parts, "reference": stored, **NO_RUNS}
    name = DTYPE_NAMES.get(array.dtype)
    if name is None:
        array = array.astype(array.dtype.newbyteorder("<"))
        name = DTYPE_NAMES.get(array.dtype)
        if name is None:
            raise TypeError(
                f"arrays of {array.dtype} can't be packed; use one of {', '.join(DTYPES)}"
            )
    parts = {"dtype": name, "shape": array.shape, "data": array.tobytes()}
    return {**parts, "reference": None, **NO_RUNS}


def pack_runs(array: Array) -> dict[str, Any]:
    """Return the PackedTensor record of an array: as runs of equal bits, if that takes half of
    the bytes or less.
    """
    if (
        isinstance(array, StoredArray)
        or array.ndim != 1
        or array.size < MIN_RUN_VALUES
        or array.nbytes > MAX_RUN_BYTES
        or array.dtype not in DTYPE_NAMES
    ):
        return pack(array)
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")
    begins = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    if 2 * (len(begins) + 1) * (array.itemsize + RUN_DTYPE.itemsize) > array.nbytes:
        return pack(array)
    begins = np.concatenate([[0], begins])
    lengths = np.diff(begins, append=array.size).astype(RUN_DTYPE)
    packed = pack(array[begins])
    return {**packed, "shape": array.shape, "run_lengths": lengths.tobytes()}


def dense(array: Array, *, what: str) -> NDArray[np.generic]:
    """Return an array whose values are needed; an array that is still in the object store is an
    error of the caller.

    Args:
        array: A field of an event.
        what: Names the field, for the error.
    Raises:
        TypeError: The array was not fetched.
    """
    if isinstance(array, StoredArray):
        raise TypeError(f"{what} is still in the object store; fetch it with check_out first")
    return array


def unpack(record: dict[str, Any]) -> Array:
    """Return the array of a PackedTensor record, a read-only view on its bytes.

    Raises:
        CorruptRecord: dtype, shape and bytes don't agree; the text gives all three.
    """
    dtype, shape, data = DTYPES.get(record["dtype"]), record["shape"], record["data"]
    if dtype is None:
        raise CorruptRecord(
            f"packed tensor has dtype {record['dtype']!r}; known are {', '.join(DTYPES)}"
        )
    if data is None:
        if record["reference"] is None:
            raise CorruptRecord("packed tensor has neither data nor reference")
        return StoredArray(record["dtype"], tuple(shape), ObjectRef(**record["reference"]))
    if record.get("run_lengths") is not None:
        raise CorruptRecord("packed tensor has runs, and is an element of a list")
    size = shape[0] if len(shape) == 1 else math.prod(shape)
    if size * dtype.itemsize != len(data) or min(shape, default=0) < 0:
        raise CorruptRecord(
            f"packed tensor of {record['dtype']} and shape {list(shape)} can't have "
            f"{len(data)} bytes"
        )
    array: NDArray[Any] = np.frombuffer(data, dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def unpack_runs(record: dict[str, Any]) -> Array:
    """Return the array of a PackedTensor record, read-only, which may be packed as runs.

    Raises:
        CorruptRecord: As `unpack`, or the runs don't add up to the shape.
    """
    if (run_bytes := record.get("run_lengths")) is None:
        return unpack(record)
    shape, num_runs = record["shape"], len(run_bytes) // RUN_DTYPE.itemsize
    values = unpack({**record, "shape": [num_runs], "run_lengths": None})
    lengths = np.frombuffer(run_bytes[: num_runs * RUN_DTYPE.itemsize], RUN_DTYPE)
    if (
        isinstance(values, StoredArray)
        or len(run_bytes) % RUN_DTYPE.itemsize
        or lengths.min(initial=1) < 1
        or [int(lengths.sum(dtype=np.int64))] != list(shape)
        or shape[0] * values.itemsize > MAX_RUN_BYTES
    ):
        raise CorruptRecord(
            f"packed tensor of {record['dtype']} and shape {list(shape)} has {num_runs} runs that "
            f"don't add up to it, or more than {MAX_RUN_BYTES} bytes"
        )
    array = np.repeat(values, lengths)
    array.flags.writeable = False
    return array
