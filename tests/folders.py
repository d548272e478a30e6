"""Folders that live as long as the test process."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

_open = ExitStack()
atexit.register(_open.close)


def delete_kept_folders() -> None:
    """Delete them before the process ends, when nothing uses them any more."""
    _open.close()


def kept_folder(name: str) -> Path:
    """Make a folder that is deleted when the process ends."""
    return Path(
        _open.enter_context(TemporaryDirectory(prefix=f"relax-{name}-", ignore_cleanup_errors=True))
    )
