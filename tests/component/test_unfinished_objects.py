"""What killed writers leave in a local store is deleted with the folder in which they wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_events.events.parts import CheckpointRef
from relax_events.objects import ObjectStore, version_objects
from relax_events.objects.rights import FOLDERS
from relax_events.objects.unfinished import ABANDONED_SECONDS, delete_unfinished_files
from relax_events.objects.version_objects import (
    build_version_folder,
    delete_objects_before,
    list_stored_versions,
)
from relax_events.roles import handover
from relax_events.training.checkpoint import checkpoints, critic_checkpoints
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.ranks import SingleRank
from relax_events.weights import artifact_writer
from relax_events.weights.artifact_writer import delete_weights, stored_versions

KILLED_WRITER = """
import os, signal, sys
import obstore
from obstore.store import LocalStore

writer = obstore.open_writer(LocalStore(sys.argv[1], mkdir=True), sys.argv[2], buffer_size=1024)
writer.write(bytes(1_000_000))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(tmp_path.as_uri())


def leave(tmp_path: Path, name: str, *, age_seconds: float = ABANDONED_SECONDS + 60) -> Path:
    """Leave a file as a killed writer does, `age_seconds` ago."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    written_at = path.stat().st_mtime - age_seconds
    os.utime(path, (written_at, written_at))
    return path


def test_killed_writer_leaves_a_file_that_is_deleted_and_not_listed(
    store: ObjectStore, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path), "samples/00000001/tokens"]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) == 1
    assert store.list("") == []
    store.delete_unfinished("samples/", min_age_seconds=0)
    assert list(tmp_path.iterdir()) == [], "its folders are deleted too"
    assert tmp_path.is_dir()


def test_file_that_grew_lately_and_finished_objects_stay(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.put_at("weights/00000001/model", b"whole")
    leave(tmp_path, "weights/00000001/model#1")
    growing = leave(tmp_path, "weights/00000001/model#2", age_seconds=0)
    numbered = leave(tmp_path, "weights/00000001/not#a-number")
    store.delete_unfinished("weights/")
    assert store.get_at("weights/00000001/model") == b"whole"
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {tmp_path / "weights/00000001/model", growing, numbered}
    assert delete_unfinished_files(tmp_path, "absent/", min_age_seconds=0) == 0


def test_store_without_a_directory_has_none() -> None:
    store = ObjectStore.open("memory://")
    store.put_at("weights/00000001/model", b"whole")
    store.delete_unfinished("weights/", min_age_seconds=0)
    assert store.list("") == ["weights/00000001/model"]


def test_folder_of_a_policy_version_ends_with_what_was_left_in_it(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.put(b"whole", folder=build_version_folder(1))
    leave(tmp_path, f"{build_version_folder(1)}sha256/9b/9b60#1")
    leave(tmp_path, f"{build_version_folder(2)}sha256/9b/9b60#1")
    leave(tmp_path, f"{build_version_folder(3)}sha256/9b/9b60#1")
    assert list_stored_versions(store) == [1, 2, 3]
    assert delete_objects_before(store, 3) == 1
    assert list_stored_versions(store) == [3]


def test_weights_of_a_trainer_that_was_killed_are_deleted(
    store: ObjectStore, tmp_path: Path
) -> None:
    leave(tmp_path, "weights/00000004/model-00001.safetensors#1")
    assert stored_versions(store) == [4]
    delete_weights(store, 4)
    assert stored_versions(store) == []


def test_half_written_checkpoints_up_to_the_newest_are_deleted(
    store: ObjectStore, tmp_path: Path
) -> None:
    older, newer = (
        leave(tmp_path, f"checkpoints/{version:08d}/dead/shard-00000-of-00001.safetensors#1")
        for version in (2, 9)
    )
    with Checkpoints(store, ranks=SingleRank(), keep=2) as saved:
        saved.prune(CheckpointRef(3, store.uri("checkpoints/00000003/x"), b""))
    assert not older.exists()
    assert newer.exists(), "its save may be going on"


def test_deletion_of_a_run_covers_every_folder_that_it_writes() -> None:
    written = {
        artifact_writer.PREFIX,
        checkpoints.PREFIX,
        critic_checkpoints.FOLDER,
        handover.PREFIX,
        version_objects.PREFIX,
        "sha256/",
    }
    assert {folder for folder in written if not folder.startswith(FOLDERS)} == set()
