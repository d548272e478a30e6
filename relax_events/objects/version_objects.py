"""Objects that records of one policy version refer to: they lie in a folder of the version, and go
when its records go.

    samples/<policy version>/sha256/ab/abcd...      large arrays of samples, media that an environment showed
    sha256/ab/abcd...                               media of prompts, which later versions may show again: they stay

Equal content of one version is stored once. An object never lies in a folder older than a record
that refers to it.
"""

from __future__ import annotations

from relax_events.objects.store import ObjectStore

PREFIX = "samples/"


def build_version_folder(policy_version: int) -> str:
    """Return where the objects of a version lie, with a slash at the end."""
    return f"{PREFIX}{policy_version:08d}/"


def list_stored_versions(store: ObjectStore) -> list[int]:
    """Return the versions that have objects, oldest first."""
    names = (folder.removeprefix(PREFIX).rstrip("/") for folder in store.list_folders(PREFIX))
    return sorted(int(name) for name in names if name.isdecimal())


def delete_objects_before(store: ObjectStore, policy_version: int) -> int:
    """Delete the objects of all versions before this one; return how many went. What an interrupted
    call has left goes with the next.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    num_deleted = 0
    for version in list_stored_versions(store):
        if version < policy_version:
            keys = store.list(build_version_folder(version))
            store.delete(keys)
            num_deleted += len(keys)
    return num_deleted
