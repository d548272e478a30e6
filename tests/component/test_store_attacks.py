"""A reader uses the bytes that it verified: another writer of the store's folder changes no copy,
leads no call out of the store, and ends no process.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from relax_events.attacks.doors.stored import READERS
from relax_events.attacks.stores import (
    AFTER_READING,
    BEFORE_READING,
    KEYS_OUTSIDE,
    UNHASHED,
    foreign_claims,
    keep_second_name,
    link_folder,
)
from relax_events.errors import ConfigError, ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.objects import store as store_module
from relax_events.objects.download import download
from relax_events.objects.marker import claim_store
from relax_events.objects.rights import MARKER
from relax_events.objects.version_objects import build_version_folder, delete_objects_before

KEY = "weights/00000001/files"
CONTENT = bytes(range(256)) * 40
PART_BYTES = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", PART_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open((tmp_path / "objects").as_uri())


def put(store: ObjectStore, tmp_path: Path) -> tuple[ObjectRef, Path]:
    return store.put_at(KEY, CONTENT), tmp_path / "objects" / KEY


@pytest.mark.parametrize(
    ("attack", "reader", "is_hashed"),
    [
        *product(BEFORE_READING, READERS, [True]),
        *product(
            sorted(BEFORE_READING.keys() - UNHASHED), ["get_buffer", "download", "copy_to"], [False]
        ),
    ],
)
def test_attacked_object_is_refused_and_leaves_no_file(
    store: ObjectStore, tmp_path: Path, *, reader: str, attack: str, is_hashed: bool
) -> None:
    reference, path = put(store, tmp_path)
    BEFORE_READING[attack](path)
    wanted = reference if is_hashed else ObjectRef(reference.uri, b"", reference.num_bytes)
    with pytest.raises(ObjectError, match="weights/00000001/files"):
        READERS[reader](store, wanted, tmp_path)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("attack", AFTER_READING)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("has_second_name", [True, False])
def test_what_was_read_stays_as_it_was_verified(
    store: ObjectStore, tmp_path: Path, *, reader: str, attack: str, has_second_name: bool
) -> None:
    reference, path = put(store, tmp_path)
    target = keep_second_name(path, tmp_path / "second") if has_second_name else path
    read = READERS[reader](store, reference, tmp_path)
    AFTER_READING[attack](target)
    assert read() == CONTENT


@pytest.mark.parametrize("reader", ["get_buffer", "download", "copy_to"])
def test_object_that_becomes_shorter_while_it_is_read_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reader: str
) -> None:
    reference, path = put(store, tmp_path)
    fill = store_module._fill

    def truncate_first(memory: memoryview, file: object) -> int:
        AFTER_READING["truncated"](path)
        return fill(memory, file)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module, "_fill", truncate_first)
    with pytest.raises(ObjectError, match="was altered: it must have"):
        READERS[reader](store, ObjectRef(reference.uri, b"", len(CONTENT)), tmp_path)
    assert not (tmp_path / "copy").exists()


TRUNCATED_IN_USE = """
import os, sys
from relax_events.objects import ObjectStore
from relax_events.events.parts import ObjectRef

store = ObjectStore.open(sys.argv[1])
reference = store.put_at("weights/1/a", bytes(10_000_000))
data = store.get_buffer(ObjectRef(reference.uri, b"", reference.num_bytes))
os.truncate(sys.argv[2], 0)
print(sum(data[::4096]), len(data))
"""


def test_truncation_of_an_object_in_use_ends_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRUNCATED_IN_USE, tmp_path.as_uri()]
    ended = subprocess.run(
        [*command, str(tmp_path / "weights/1/a")], capture_output=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout.split()) == (0, [b"0", b"10000000"])


def test_downloaded_file_is_private_and_shares_nothing_with_the_store(
    store: ObjectStore, tmp_path: Path
) -> None:
    reference, path = put(store, tmp_path)
    copy = download(store, reference, tmp_path / "copy")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert (copy.stat().st_nlink, path.stat().st_nlink) == (1, 1)
    assert copy.stat().st_ino != path.stat().st_ino


def test_reader_of_a_named_object_follows_no_link(store: ObjectStore, tmp_path: Path) -> None:
    _, path = put(store, tmp_path)
    BEFORE_READING["a link to the same bytes"](path)
    with pytest.raises(ObjectError, match="links are not followed"):
        store.get_at(KEY)
    assert store.num_bytes(KEY) is None
    assert KEY not in store.list("")


@pytest.mark.parametrize("key", KEYS_OUTSIDE)
def test_key_outside_of_the_store_names_no_object(store: ObjectStore, key: str) -> None:
    reference = ObjectRef(store.uri("") + key, bytes(32), 1)
    for call in (
        lambda: store.put_at(key, b"x"),
        lambda: store.get_at(key),
        lambda: store.delete([key]),
        lambda: store.get(reference),
        lambda: store.get_buffer(reference),
        lambda: store.copy_to(reference, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ObjectError, match="can't name an object"):
            call()


def test_deletion_of_old_samples_follows_no_link_into_the_weights(
    store: ObjectStore, tmp_path: Path
) -> None:
    put(store, tmp_path)
    folder = build_version_folder(0)
    link_folder(tmp_path / "objects" / folder.rstrip("/"), tmp_path / "objects/weights/00000001")
    link_folder(tmp_path / "objects/samples/00000001/deep", tmp_path / "objects/weights/00000001")
    assert delete_objects_before(store, 5) == 0
    with pytest.raises(ObjectError, match="links are not followed"):
        store.delete([f"{folder}files"])
    with pytest.raises(ObjectError, match="links are not followed"):
        store.delete_unfinished(folder, min_age_seconds=0)
    assert store.get_at(KEY) == CONTENT


def test_writer_follows_no_link_into_the_weights(store: ObjectStore, tmp_path: Path) -> None:
    put(store, tmp_path)
    link_folder(tmp_path / "objects/samples", tmp_path / "objects/weights")
    for write in (store.put_at, store.put_new):
        with pytest.raises(ObjectError, match="links are not followed"):
            write("samples/00000001/files", b"other")
    with pytest.raises(ObjectError, match="links are not followed"):
        store.list("samples/")
    assert store.get_at(KEY) == CONTENT


@pytest.mark.parametrize("claim", foreign_claims("mine"))
def test_store_with_a_foreign_claim_is_refused(store: ObjectStore, claim: str) -> None:
    store.put_at(MARKER, foreign_claims("mine")[claim])
    with pytest.raises(ConfigError, match=r"belongs to|must be a marker"):
        claim_store(store, run_id="mine", cluster_id="here")


def test_store_whose_marker_is_a_link_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    claim_store(store, run_id="mine")
    BEFORE_READING["a link to the same bytes"](tmp_path / "objects" / MARKER)
    with pytest.raises(ConfigError, match="another owner"):
        claim_store(store, run_id="mine")
