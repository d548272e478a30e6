"""Media references of a row: accepted and rejected ones."""

import base64
import os
from pathlib import Path

import pytest

from relax_events.config import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import Modality
from relax_events.media.items import MediaAccess, MediaItem, read_items

LIMITS = MediaConfig(max_item_bytes=100)
CONTENT = b"\x89PNG and so on"


def item(source: str | bytes, root: Path | None = None) -> MediaItem:
    return MediaItem(Modality.IMAGE, source, "rows.jsonl:3: images[0]", MediaAccess(root))


def check_refused(one: MediaItem, reason: str, *, max_bytes: int = 100) -> str:
    with pytest.raises(MediaError) as caught:
        one.read(MediaConfig(max_item_bytes=max_bytes))
    assert caught.value.reason == reason
    return str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images" / "inner").mkdir(parents=True)
    (tmp_path / "images" / "inner" / "a.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"not for you")
    return tmp_path / "images"


def test_media_item_reads_bytes_data_uris_and_files_below_the_root(root: Path) -> None:
    assert item(CONTENT).read(LIMITS) == CONTENT
    assert (
        item("data:image/png;base64," + base64.b64encode(CONTENT).decode()).read(LIMITS) == CONTENT
    )
    assert item("data:,a%20b").read(LIMITS) == b"a b"
    assert item("inner/a.png", root).read(LIMITS) == CONTENT
    assert item(str(root / "inner" / "a.png"), root).read(LIMITS) == CONTENT


@pytest.mark.parametrize("path", ["../secret", "inner/../../secret", "/etc/passwd"])
def test_media_item_rejects_paths_outside_the_root(root: Path, path: str) -> None:
    text = check_refused(item(path, root), "outside_root")
    assert (
        text == f"rows.jsonl:3: images[0] names {path!r}, which is outside of media_root = {root}"
    )


def test_media_item_rejects_symlinks_out_of_the_root(root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "secret")
    check_refused(item("link.png", root), "outside_root")


@pytest.mark.parametrize("member", ["", "a.png"])
def test_media_item_rejects_non_regular_files(root: Path, member: str) -> None:
    """Reading a pipe without a writer would never end."""
    os.mkfifo(root / "pipe")
    one = MediaItem(Modality.IMAGE, "pipe", "row 1", MediaAccess(root), member)
    assert "can't be read: it is no regular file" in check_refused(one, "missing")


def test_media_item_rejects_file_paths_without_a_root() -> None:
    assert "set media_root next to multimodal_keys" in check_refused(item("a.png"), "no_root")


@pytest.mark.parametrize("path", ["gone.png", "inner", "a\0b"])
def test_media_item_error_names_the_unreadable_file(root: Path, path: str) -> None:
    assert "which can't be read" in check_refused(item(path, root), "missing")


@pytest.mark.parametrize("source", ["data:image/png;base64", "data:image/png;base64,***"])
def test_media_item_rejects_invalid_data_uris(source: str) -> None:
    check_refused(item(source), "bad_data_uri")


def test_media_item_rejects_content_above_the_size_limit(root: Path) -> None:
    (root / "large.png").write_bytes(bytes(11))
    data_uri = "data:;base64," + base64.b64encode(bytes(11)).decode()
    for one in (
        item(bytes(11)),
        item("large.png", root),
        item(data_uri),
        item("data:;base64," + 100 * "A"),
    ):
        assert "must be at most model.media.max_item_bytes = 10" in check_refused(
            one, "too_large", max_bytes=10
        )


def test_media_column_accepts_one_item_or_a_list_in_each_dataset_form() -> None:
    def sources(value: object) -> list[str | bytes]:
        return [
            one.source
            for one in read_items(value, modality=Modality.IMAGE, location="row 1: images")
        ]

    assert sources(None) == []
    assert sources("a.png") == ["a.png"]
    assert sources([{"bytes": b"x", "path": "a.png"}, {"bytes": None, "path": "b.png"}]) == [
        b"x",
        "b.png",
    ]
    with pytest.raises(
        MediaError,
        match=r"row 1: images\[1\] is a int; media are paths, URLs, data URIs, bytes, or objects",
    ):
        sources(["a.png", 7])
