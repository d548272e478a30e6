"""Copies objects into files of this machine, whatever their size, and verifies them."""

from __future__ import annotations

import os
from pathlib import Path

from relax_events.errors import EnvironmentProblem
from relax_events.events.parts import ObjectRef
from relax_events.objects.store import ObjectStore

OWNER_ONLY = 0o600


def download(store: ObjectStore, reference: ObjectRef, path: Path) -> Path:
    """Copy an object into a file of its own, verified by its size, and by its digest where the
    reference has one, and return the file.

    The file is readable and writable by this account alone, and shares no bytes with the store: it
    stays as verified when the object is changed, truncated or deleted. Memory: a few parts of
    16 MiB.

    Args:
        store: The store that holds it.
        reference: The object.
        path: The file; must not exist, and is not there after an error.
    Raises:
        EnvironmentProblem: The file can't be written.
        ObjectError: The object is missing, or of another size or digest; the text names it.
        StoreUnavailable: The store does not answer.
    """
    try:
        file = open(path, "x+b", opener=_open_private)  # noqa: SIM115 closed below
    except OSError as error:
        raise EnvironmentProblem(
            f"{reference.uri} can't be copied to {path}: {error.strerror}; give another folder"
        ) from error
    try:
        with file:
            store.copy_to(reference, file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, OWNER_ONLY)
