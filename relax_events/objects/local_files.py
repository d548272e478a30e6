"""The files of a store in a folder.

Only regular files are objects, and no link below the store's folder is followed: a role that may
write a part of the store leads no reader, writer or deletion out of that part.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import BinaryIO

from relax_events.objects.unfinished import delete_unfinished_files
from relax_events.regular_files import LINK, open_below, open_folders

KEY_PATTERN = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")


class LocalFiles:
    """Opens, lists and deletes the files of a store's folder; thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, key: str) -> BinaryIO:
        """Open an object for reading.

        Raises:
            OSError: It is missing, unreadable, not a regular file, or behind a link.
        """
        return open_below(self._directory, key)

    def num_bytes(self, key: str) -> int:
        """Return the size of an object.

        Raises:
            FileNotFoundError: No regular file has this name.
        """
        state = (self._directory / key).lstat()
        if not S_ISREG(state.st_mode):
            raise FileNotFoundError(f"{key} is no regular file")
        return state.st_size

    def require_no_links(self, key: str) -> None:
        """Refuse to write an object into a folder that is a link.

        Raises:
            OSError: A folder of the key is a link.
        """
        path = self._directory
        for name in key.split("/")[:-1]:
            path /= name
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                return
            if S_ISLNK(mode):
                raise OSError(errno.ELOOP, LINK, str(path))

    def list_objects(self, prefix: str) -> list[str]:
        """Return the sorted names of the objects in a folder and its subfolders.

        Raises:
            OSError: A folder can't be read, or the prefix is behind a link.
        """
        return sorted(self._walk([name for name in prefix.split("/") if name]))

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of a folder's subfolders, without a slash at their end.

        Raises:
            OSError: The folder can't be read, or is behind a link.
        """
        folders = [name for name in prefix.split("/") if name]
        entries = self._list_entries(folders)
        return ["/".join([*folders, name]) for name, is_folder in entries if is_folder]

    def delete(self, key: str) -> None:
        """Delete an object, and the folders that are empty then; a missing one is skipped.

        Raises:
            OSError: It can't be deleted, or is behind a link.
        """
        *folders, name = key.split("/")
        try:
            with open_folders(self._directory, folders) as handles:
                os.unlink(name, dir_fd=handles[-1])
                with suppress(OSError):  # a folder is not empty
                    for handle, folder in zip(handles[-2::-1], reversed(folders), strict=True):
                        os.rmdir(folder, dir_fd=handle)
        except FileNotFoundError:
            if not self._directory.is_dir():
                raise

    def delete_unfinished(self, folder: str, *, min_age_seconds: float) -> None:
        """Delete what killed writers have left in a folder; see `delete_unfinished_files`.

        Raises:
            OSError: A file can't be deleted, or the folder is behind a link.
        """
        self.require_no_links(folder)
        delete_unfinished_files(self._directory, folder, min_age_seconds=min_age_seconds)

    def _walk(self, folders: Sequence[str]) -> Iterator[str]:
        for name, is_folder in self._list_entries(folders):
            if is_folder:
                yield from self._walk([*folders, name])
            else:
                yield "/".join([*folders, name])

    def _list_entries(self, folders: Sequence[str]) -> list[tuple[str, bool]]:
        """Return the regular files and folders in a folder that may be a key's part, and whether
        each is a folder; nothing if the folder is missing.
        """
        try:
            with (
                open_folders(self._directory, folders) as handles,
                os.scandir(handles[-1]) as entries,
            ):
                return [
                    (entry.name, is_folder)
                    for entry in entries
                    if KEY_PATTERN.fullmatch(entry.name)
                    and (
                        (is_folder := entry.is_dir(follow_symlinks=False))
                        or entry.is_file(follow_symlinks=False)
                    )
                ]
        except (FileNotFoundError, NotADirectoryError):
            if not self._directory.is_dir():
                raise
            return []
