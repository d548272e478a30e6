"""Formatting a data folder, and the disk space it needs."""

import base64
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.kafka.embedded.storage import create_id, ensure_formatted, require_free_space

Usage = namedtuple("Usage", "total used free")


def test_ensure_formatted_writes_identity_and_checkpoint(tmp_path: Path) -> None:
    ensure_formatted(tmp_path / "data")
    written = dict(
        line.split("=", 1)
        for line in (tmp_path / "data" / "meta.properties").read_text().splitlines()
    )
    assert written.keys() == {"version", "cluster.id", "node.id", "directory.id"}
    assert (written["version"], written["node.id"]) == ("1", "1")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "bootstrap.checkpoint",
        "meta.properties",
    ]


def test_ensure_formatted_keeps_a_folder_when_it_is_formatted(tmp_path: Path) -> None:
    ensure_formatted(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ensure_formatted(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_ensure_formatted_reformats_a_folder_left_half_formatted_by_a_crash(tmp_path: Path) -> None:
    (tmp_path / "bootstrap.checkpoint").write_bytes(b"half")
    (tmp_path / "meta.properties.tmp").write_text("version=1\n")
    ensure_formatted(tmp_path)
    assert (tmp_path / "bootstrap.checkpoint").stat().st_size > 100
    assert "directory.id=" in (tmp_path / "meta.properties").read_text()


def test_new_id_is_sixteen_bytes_and_never_starts_with_a_dash() -> None:
    ids = {create_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(
        len(base64.urlsafe_b64decode(text + "==")) == 16 and not text.startswith("-")
        for text in ids
    )


def test_require_free_space_passes_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 256 << 20))
    require_free_space(tmp_path)


def test_require_free_space_reports_folder_and_sizes_when_space_is_low(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 100 << 20))
    with pytest.raises(
        EnvironmentProblem,
        match=(
            f"the disk under {tmp_path} has 100 MiB free, the embedded broker needs at least 256 "
            "MiB"
        ),
    ):
        require_free_space(tmp_path)
