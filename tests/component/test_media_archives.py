"""Members of tar files as media: a row's member is read in place, and each kind of hostile archive
is rejected by name.
"""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_events.config import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import Modality
from relax_events.media import archives
from relax_events.media.items import MediaAccess, MediaItem, read_items
from relax_events.media.library import MediaLibrary
from tests.unit.image_model import image_file, image_run

LIMITS = MediaConfig()


def tar_of(path: Path, *members: tuple[str, bytes | tarfile.TarInfo], kind: str = "w") -> Path:
    """Write an archive with Python's tarfile."""
    with tarfile.open(path, kind) as archive:  # type: ignore[call-overload]
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = content if isinstance(content, bytes) else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo("a.png")
    info.type, info.linkname = kind, target
    return info


def item(root: Path, path: str = "0.tar", member: str = "a.png") -> MediaItem:
    (found,) = read_items(
        {"path": path, "member": member},
        modality=Modality.IMAGE,
        location="row 1: images",
        access=MediaAccess(root),
    )
    return found


def reason(root: Path, path: str = "0.tar", member: str = "a.png") -> str:
    with pytest.raises(MediaError, match=r"row 1: images\[0\]") as caught:
        item(root, path, member).read(LIMITS)
    return caught.value.reason


def test_archive_members_are_read_in_place_without_extraction(tmp_path: Path) -> None:
    files = {f"set/{number}.png": image_file(32, 32 + 16 * number) for number in range(3)}
    long = "very/" * 60 + "a.png"
    tar_of(tmp_path / "0.tar", *files.items(), (long, b"long"), ("set/0.png", b"newer"))
    assert [item(tmp_path, member=name).read(LIMITS) for name in files] == [
        b"newer",
        *list(files.values())[1:],
    ]
    assert item(tmp_path, member=long).read(LIMITS) == b"long"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.tar"]


def test_archive_index_is_read_once_until_the_archive_changes(tmp_path: Path) -> None:
    tar_of(tmp_path / "0.tar", ("a.png", b"one"))
    before = archives._read_index.cache_info().misses
    assert [item(tmp_path).read(LIMITS) for _ in range(5)] == [b"one"] * 5
    assert archives._read_index.cache_info().misses == before + 1
    tar_of(tmp_path / "0.tar", ("b.png", bytes(2000)), ("a.png", b"two"))
    assert item(tmp_path).read(LIMITS) == b"two"


def test_archive_members_with_equal_content_are_stored_once(tmp_path: Path) -> None:
    tar_of(
        tmp_path / "0.tar",
        ("a.png", image_file(48, 32)),
        ("b.png", image_file(48, 32)),
        ("c.png", image_file(64, 32)),
    )
    library = MediaLibrary(image_run(tmp_path / "run"))
    one, same, other = (
        library.add(item(tmp_path, member=name)) for name in ("a.png", "b.png", "c.png")
    )
    assert (one.width, one.height) == (48, 32)
    assert one.uri == same.uri != other.uri


@pytest.mark.parametrize(
    ("member", "reported"),
    [
        (special(tarfile.SYMTYPE, "/etc/passwd"), "no_file"),
        (special(tarfile.LNKTYPE, "../b.png"), "no_file"),
        (special(tarfile.DIRTYPE), "no_file"),
        (special(tarfile.CHRTYPE), "no_file"),
        (special(tarfile.FIFOTYPE), "no_file"),
    ],
)
def test_archive_member_that_is_not_a_regular_file_is_rejected(
    tmp_path: Path, member: tarfile.TarInfo, reported: str
) -> None:
    tar_of(tmp_path / "0.tar", ("a.png", member), ("b.png", b"good"))
    assert reason(tmp_path) == reported
    assert item(tmp_path, member="b.png").read(LIMITS) == b"good"


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.png", "in/../../a.png"])
def test_archive_member_name_with_path_traversal_is_rejected(tmp_path: Path, name: str) -> None:
    tar_of(tmp_path / "0.tar", (name, b"x"))
    assert reason(tmp_path, member=name) == "unsafe_name"


def test_archive_outside_of_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tar_of(tmp_path / "0.tar", ("a.png", b"x"))
    (tmp_path / "in/link.tar").symlink_to(tmp_path / "0.tar")
    assert reason(tmp_path / "in", "../0.tar") == "outside_root"
    assert reason(tmp_path / "in", "link.tar") == "outside_root"
    assert reason(tmp_path, "1.tar") == "missing"


def claiming(size: int) -> Callable[[bytes], bytes]:
    """Let the first member claim so many bytes."""

    def spoil(data: bytes) -> bytes:
        info = tarfile.TarInfo("a.png")
        info.size = size
        return info.tobuf(tarfile.GNU_FORMAT) + data[512:]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        (claiming(2**40), "too_large"),
        (claiming(15 * 1024**2), "truncated"),
        (lambda data: data[:600], "truncated"),
        (lambda data: data[:300], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: bytes(1024), "missing"),
        (lambda data: b"no archive at all" * 100, "truncated"),
    ],
    ids=[
        "bomb",
        "claims more than there is",
        "cut in the content",
        "cut in the head",
        "nothing",
        "empty",
        "no tar file",
    ],
)
def test_corrupt_archive_is_rejected_with_its_name(
    tmp_path: Path, spoil: Callable[[bytes], bytes], reported: str
) -> None:
    whole = tar_of(
        tmp_path / "0.tar", ("a.png", bytes(range(256)) * 8), ("b.png", b"x")
    ).read_bytes()
    (tmp_path / "0.tar").write_bytes(spoil(whole))
    assert reason(tmp_path) == reported


def test_tar_long_name_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    head = tarfile.TarInfo("././@LongLink")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, 8 * 1024**3
    (tmp_path / "0.tar").write_bytes(head.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert reason(tmp_path) == "truncated"


def test_endless_chain_of_tar_headers_is_rejected(tmp_path: Path) -> None:
    head = tarfile.TarInfo("././@LongLink")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, 1
    (tmp_path / "0.tar").write_bytes(
        (head.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")) * 3000
    )
    assert reason(tmp_path) == "truncated"


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    tar_of(tmp_path / "0.tar", ("a.png", b"x"), kind="w:gz")
    with pytest.raises(MediaError, match="it must be a plain tar file, not a compressed one"):
        item(tmp_path).read(LIMITS)


def test_archive_with_too_many_members_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    tar_of(tmp_path / "0.tar", *((f"{name}.png", b"x") for name in "abc"))
    with pytest.raises(MediaError, match="more than 2 members"):
        item(tmp_path).read(LIMITS)
