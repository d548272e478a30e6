"""Writes a folder under another name, and gives it its own name once it is complete."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_events.errors import ConfigError, EnvironmentProblem

MARKS = ("config.json", "adapter_config.json")
"""A folder without any of them is neither a model's nor adapters', and is never replaced."""


def require_free(target: Path, *, replaces: bool) -> None:
    """Refuse a folder that can't be written to.

    Raises:
        ConfigError: It is a file, or holds something and is not to be replaced.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is not a folder; give another one to --to")
    if not any(target.iterdir()):
        return
    if not replaces:
        raise ConfigError(
            f"{target} is not empty; give another folder to --to, or replace it by --force"
        )
    if not any((target / mark).is_file() for mark in MARKS):
        raise ConfigError(
            f"{target} is no model folder, it holds no {MARKS[0]}, so --force does not replace it; "
            "give another folder to --to"
        )


@contextmanager
def write_folder(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an error; after an
    error it is deleted.

    The next process deletes the files that a killed process left.

    Args:
        target: The folder to make.
        replaces: Replace an existing model folder.
    Raises:
        ConfigError: It is not empty, or another process is writing it.
        EnvironmentProblem: It can't be written.
    """
    target = target.resolve()
    require_free(target, replaces=replaces)
    part = target.with_name(f".{target.name}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with _locked(part, target):
            _clear(part)
            try:
                yield part
                require_free(target, replaces=replaces)
                _rename(part, target)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        raise EnvironmentProblem(
            f"{target} can't be written: {error.strerror or error}; give a folder that can to --to"
        ) from error


@contextmanager
def _locked(part: Path, target: Path) -> Iterator[None]:
    """Hold the lock of an unfinished folder, which ends with the process."""
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing {target}; wait for it, or give another folder to --to"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _rename(part: Path, target: Path) -> None:
    """Rename the folder, and sync its parent, so that the name outlives a power failure."""
    old = target.with_name(f".{target.name}.old")
    if target.is_dir() and any(target.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    part.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)
