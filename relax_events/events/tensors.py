"""Numeric arrays as little-endian bytes with dtype and shape: a hundred times faster than Avro
arrays, decoded as views.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Array, ObjectRef, StoredArray

DTYPES = {
    name: np.dtype(name)
    for name in ("|u1", "|i1", "|b1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
}

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
        return {"dtype": array.dtype, "shape": list(array.shape), "data": None, "reference": stored}
    name = DTYPE_NAMES.get(array.dtype)
    if name is None:
        array = array.astype(array.dtype.newbyteorder("<"))
        name = DTYPE_NAMES.get(array.dtype)
        if name is None:
            raise TypeError(
                f"arrays of {array.dtype} can't be packed; use one of {', '.join(DTYPES)}"
            )
    return {"dtype": name, "shape": array.shape, "data": array.tobytes(), "reference": None}


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
    size = shape[0] if len(shape) == 1 else math.prod(shape)
    if size * dtype.itemsize != len(data) or min(shape, default=0) < 0:
        raise CorruptRecord(
            f"packed tensor of {record['dtype']} and shape {list(shape)} can't have "
            f"{len(data)} bytes"
        )
    array: NDArray[Any] = np.frombuffer(data, dtype)
    return array if len(shape) == 1 else array.reshape(shape)
