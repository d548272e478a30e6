"""Copies objects into files of this machine, whatever their size, and verifies them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from urllib.parse import unquote, urlsplit

from relax_events.errors import EnvironmentProblem, ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.objects.store import NUM_PARALLEL_PARTS, PART_BYTES, ObjectStore


def download(store: ObjectStore, reference: ObjectRef, path: Path) -> Path:
    """Make an object a file, verified by its size, and by its digest where the reference has one,
    and return the file.

    A local store's object becomes a second name of the same file where the file system allows it;
    else it is copied. The file stays when the object is deleted. Memory: a few parts of 16 MiB.

    Args:
        store: The store that holds it.
        reference: The object.
        path: The file; must not exist.
    Raises:
        EnvironmentProblem: The file can't be written.
        ObjectError: The object is missing, or of another size or digest; the text names it.
        StoreUnavailable: The store does not answer.
    """
    key = store.key(reference.uri)
    num_bytes = store.num_bytes(key)
    if num_bytes is None:
        raise ObjectError(f"{reference.uri} is not in the object store any more")
    if num_bytes != reference.num_bytes:
        raise ObjectError(
            f"{reference.uri} was altered: it must have {reference.num_bytes} bytes, got "
            f"{num_bytes}"
        )
    try:
        if not _is_linked(store.uri(key), path):
            _copy(store, key, num_bytes, path)
        if not reference.digest:
            return path
        with path.open("rb") as file:
            seen = file_digest(file, "sha256").digest()
    except OSError as error:
        raise EnvironmentProblem(
            f"{reference.uri} can't be copied to {path}: {error.strerror}; free space there, or "
            "give another folder"
        ) from error
    if seen != reference.digest:
        path.unlink()
        raise ObjectError(
            f"{reference.uri} was altered: its SHA-256 must be {reference.digest.hex()}, got "
            f"{seen.hex()}"
        )
    return path


def _is_linked(uri: str, path: Path) -> bool:
    """Give a local object a second name; False where that is not possible."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        with suppress(OSError):  # another file system, one without links, or a deleted object
            os.link(unquote(parts.path), path)
            return True
    return False


def _copy(store: ObjectStore, key: str, num_bytes: int, path: Path) -> None:
    """Copy an object in parts, a few at a time.

    Raises:
        ObjectError: A part can't be read.
        OSError: The file can't be written.
    """
    starts = range(0, num_bytes, PART_BYTES)
    with path.open("xb") as file, ThreadPoolExecutor(NUM_PARALLEL_PARTS) as pool:
        for first in range(0, len(starts), NUM_PARALLEL_PARTS):
            parts = starts[first : first + NUM_PARALLEL_PARTS]
            for data in pool.map(
                lambda start: store.get_range(
                    key, start=start, end=min(start + PART_BYTES, num_bytes)
                ),
                parts,
            ):
                file.write(data)
