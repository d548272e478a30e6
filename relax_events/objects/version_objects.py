"""Objects of one policy version: they lie in a folder of the version and are deleted with its
records.

    samples/<policy version>/sha256/ab/abcd...      arrays of samples, media from environments
    sha256/ab/abcd...                               media of prompts, never deleted

Equal content of one version is stored once. An object never lies in a folder older than a record
that refers to it.
"""

from __future__ import annotations

from relax_events.objects.store import ObjectStore

PREFIX = "samples/"


def build_version_folder(policy_version: int) -> str:
    """Return the folder of a version's objects, with a slash at the end."""
    return f"{PREFIX}{policy_version:08d}/"


def list_stored_versions(store: ObjectStore) -> list[int]:
    """Return the versions that have objects, oldest first."""
    names = (folder.removeprefix(PREFIX).rstrip("/") for folder in store.list_folders(PREFIX))
    return sorted(int(name) for name in names if name.isdecimal())


def delete_objects_before(store: ObjectStore, policy_version: int) -> int:
    """Delete the objects of all versions before this one; return their number. The next call
    completes an interrupted one.

    Raises:
        StoreUnavailable: The store does not respond.
    """
    num_deleted = 0
    for version in list_stored_versions(store):
        if version < policy_version:
            folder = build_version_folder(version)
            keys = store.list(folder)
            store.delete(keys)
            store.delete_unfinished(folder)
            num_deleted += len(keys)
    return num_deleted
