"""Deletes what writers that were killed have left in a local store.

The storage library writes `name#1` and renames it to `name` when all bytes are there. It does not
list such files: where the listed objects of a folder are deleted, the file and the folder stay.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

ABANDONED_SECONDS = 600.0
"""A file that grew within this time may have a writer still."""
NAME_PATTERN = re.compile(r".+#\d+")


def delete_unfinished_files(directory: Path, folder: str, *, min_age_seconds: float) -> int:
    """Delete the unfinished files of a folder and its subfolders, and the folders that are empty
    then; return the number of files.

    Args:
        directory: The store's directory, which stays.
        folder: The folder's name in the store; it may be missing.
        min_age_seconds: How long ago a file must have grown last.
    """
    before = time.time() - min_age_seconds
    paths = [
        path
        for path in (directory / folder).rglob("*#*")
        if NAME_PATTERN.fullmatch(path.name) and _is_older(path, before)
    ]
    for path in paths:
        path.unlink(missing_ok=True)
        _delete_empty_folders(path.parent, directory)
    return len(paths)


def _is_older(path: Path, before: float) -> bool:
    try:
        return path.stat().st_mtime <= before
    except FileNotFoundError:  # its writer has just renamed it
        return False


def _delete_empty_folders(folder: Path, root: Path) -> None:
    with suppress(OSError):  # not empty
        while folder != root:
            folder.rmdir()
            folder = folder.parent
