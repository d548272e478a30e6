"""Exports that were altered: nothing outside of their folder is read, nothing hangs, and sizes come
first.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from relax_events.attacks.archives import ATTACKS, SPARSE_BYTES, ArchiveAttack
from relax_events.errors import CheckFailed, ConfigError
from relax_events.events.container import (
    ContainerWriter,
    LoggedRecord,
    RecordsDigest,
    read_records,
)
from relax_events.ops.export_manifest import (
    ExportedObject,
    ExportedPartition,
    Manifest,
    file_sha256,
    open_partition,
    partition_file,
    read_object,
    verify_files,
)
from relax_events.regular_files import open_below

ENTITY, KEY, OBJECT = "control.schemas", "media/a.png", b"an object"
RECORDS = [LoggedRecord(offset, 0, b"k", bytes(1000), (("h", None),)) for offset in range(3)]


def export(folder: Path) -> Manifest:
    """Write an export of one partition and one object."""
    file = partition_file(ENTITY, 0)
    (folder / file).parent.mkdir(parents=True)
    digest = RecordsDigest(with_offsets=True)
    with ContainerWriter(folder / file) as writer:
        for record in RECORDS:
            writer.write(record)
            digest.add(record)
    (folder / "objects" / KEY).parent.mkdir(parents=True)
    (folder / "objects" / KEY).write_bytes(OBJECT)
    size = (digest.num_records, digest.num_bytes, digest.hex(), file_sha256(folder / file))
    manifest = Manifest(
        "exported",
        {ENTITY: {"num_partitions": 1, "settings": {}}},
        [ExportedPartition(ENTITY, 0, 0, len(RECORDS), False, file, *size)],
        {"trainer": [(ENTITY, 0, 2)]},
        objects=[ExportedObject(KEY, len(OBJECT), sha256(OBJECT).hexdigest())],
        is_complete=True,
    )
    manifest.save(folder)
    return manifest


def read(folder: Path) -> tuple[list[LoggedRecord], bytes]:
    """Read an export as an import does."""
    manifest = Manifest.load(folder)
    verify_files(folder, manifest)
    (item,), (entry,) = manifest.partitions, manifest.objects
    with open_partition(folder, item) as file:
        records = list(read_records(file, folder / item.file))
    return records, read_object(folder, entry)


def test_export_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = export(tmp_path / "exported")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "exported")
    for folder in (tmp_path / "exported", link):
        assert Manifest.load(folder) == written
        assert read(folder) == (RECORDS, OBJECT)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_altered_export_is_refused(tmp_path: Path, attack: ArchiveAttack) -> None:
    folder = tmp_path / "exported"
    export(folder)
    (tmp_path / "outside.avro").write_bytes((folder / partition_file(ENTITY, 0)).read_bytes())
    attack.apply(folder)
    with pytest.raises((ConfigError, CheckFailed)) as caught:
        read(folder)
    assert str(folder) in str(caught.value)


def test_altered_object_of_the_same_size_is_refused(tmp_path: Path) -> None:
    export(tmp_path / "exported")
    (tmp_path / "exported" / "objects" / KEY).write_bytes(OBJECT[::-1])
    with pytest.raises(CheckFailed, match=r"a\.png was altered: its SHA-256 must be"):
        read(tmp_path / "exported")


def test_size_is_compared_before_anything_is_read(tmp_path: Path) -> None:
    manifest = export(tmp_path / "exported")
    path = tmp_path / "exported" / "objects" / KEY
    with path.open("r+b") as file:
        file.truncate(SPARSE_BYTES)
    with pytest.raises(
        CheckFailed, match=rf"it has {SPARSE_BYTES} bytes, and at most 9 were written"
    ):
        read_object(tmp_path / "exported", manifest.objects[0])


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/etc/passwd", "a//b", "a/", "a\0b"])
def test_name_outside_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("x")
    with pytest.raises(OSError, match="it lies outside of the folder"):
        open_below(tmp_path, name)
