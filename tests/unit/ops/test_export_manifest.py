"""Exports that were altered: nothing outside of their folder is read, nothing hangs, and sizes come
first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.attacks.archives import ATTACKS, SPARSE_BYTES, ArchiveAttack
from relax_events.attacks.small_export import (
    ENTITY,
    KEY,
    OBJECT,
    RECORDS,
    read_export,
    write_export,
)
from relax_events.errors import CheckFailed, ConfigError
from relax_events.ops.export_manifest import Manifest, partition_file, read_object
from relax_events.regular_files import open_below


def test_export_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = write_export(tmp_path / "exported")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "exported")
    for folder in (tmp_path / "exported", link):
        assert Manifest.load(folder) == written
        assert read_export(folder) == (RECORDS, OBJECT)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_altered_export_is_refused(tmp_path: Path, attack: ArchiveAttack) -> None:
    folder = tmp_path / "exported"
    write_export(folder)
    (tmp_path / "outside.avro").write_bytes((folder / partition_file(ENTITY, 0)).read_bytes())
    attack.apply(folder)
    with pytest.raises((ConfigError, CheckFailed)) as caught:
        read_export(folder)
    assert str(folder) in str(caught.value)


def test_altered_object_of_the_same_size_is_refused(tmp_path: Path) -> None:
    write_export(tmp_path / "exported")
    (tmp_path / "exported" / "objects" / KEY).write_bytes(OBJECT[::-1])
    with pytest.raises(CheckFailed, match=r"a\.png was altered: its SHA-256 must be"):
        read_export(tmp_path / "exported")


def test_size_is_compared_before_anything_is_read(tmp_path: Path) -> None:
    manifest = write_export(tmp_path / "exported")
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
