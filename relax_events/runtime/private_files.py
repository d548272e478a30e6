"""Restricts a run's files to its user: they hold prompts, completions and settings."""

from __future__ import annotations

import os
from contextlib import suppress

from relax_events.config import RunConfig

OTHERS = 0o077
"""The permissions of all users except the owner."""


def keep_private(config: RunConfig) -> None:
    """Restrict a run's folder to its user (0700), and new files of this process and its children
    (0600).

    An object store in a folder elsewhere may be shared between users, so there the file mode mask
    stays as it is, and the run's folder protects the rest.
    """
    with suppress(OSError):  # a worker that can't write there fails later, at its first write
        config.run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.run_directory.chmod(0o700)
    if not config.objects.uri.startswith("file:"):
        os.umask(os.umask(OTHERS) | OTHERS)
