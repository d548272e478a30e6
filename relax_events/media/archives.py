"""Read members of tar files in place: headers are indexed once, and nothing is unpacked.

A member's name is only looked up in the archive's index, and never used as a path. Only
uncompressed archives are supported: otherwise everything before a member would be decompressed each
time.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn, cast

from relax_events.errors import MediaError
from relax_events.regular_files import open_regular

MAX_MEMBERS = 200_000
"""An archive with more members is rejected."""
MAX_HEAD_BYTES = 1024**2
"""Largest header read, long names included."""
MAX_CACHED_ARCHIVES = 64
"""Archives whose index is cached."""
BLOCK = 512


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """Position of a member's bytes. `kind` describes a member that is not a regular file."""

    start: int
    size: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ArchiveIndex:
    """An archive's members by name; of two with the same name the later one, as in tar. `damage`
    describes why the index may be incomplete.
    """

    members: dict[str, ArchiveMember]
    damage: str = ""


def read_member(file: BinaryIO, name: str, *, path: Path, max_bytes: int, location: str) -> bytes:
    """Return a member's content.

    Args:
        file: The open archive.
        name: Name of the member.
        path: Path of the archive.
        max_bytes: A larger member is rejected without reading it.
        location: File and row, for errors.
    Raises:
        MediaError: There is no such member, it is not a regular file, its name is unsafe, it is too
            large, or the archive is damaged, compressed or has too many members.
    """
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        _refuse(
            location,
            path,
            name,
            "members must have relative names without ..",
            "unsafe_name",
        )
    index = _read_index(path, path.stat().st_size, path.stat().st_mtime_ns)
    member = index.members.get(name)
    if member is None:
        _refuse(
            location,
            path,
            name,
            index.damage or "there is no such member",
            "truncated" if index.damage else "missing",
        )
    if member.kind:
        _refuse(location, path, name, f"it is {member.kind}; it must be a file", "no_file")
    if member.size > max_bytes:
        _refuse(
            location,
            path,
            name,
            f"it claims {member.size} bytes; model.media.max_item_bytes is {max_bytes}",
            "too_large",
        )
    file.seek(member.start)
    data = file.read(member.size)
    if len(data) < member.size:
        _refuse(
            location,
            path,
            name,
            f"it ends after {len(data)} of its {member.size} bytes",
            "truncated",
        )
    return data


def _refuse(location: str, path: Path, name: str, why: str, reason: str) -> NoReturn:
    raise MediaError(
        f"{location} names the member {name!r} of {path}, which can't be used: {why}", reason=reason
    )


@lru_cache(maxsize=MAX_CACHED_ARCHIVES)
def _read_index(path: Path, num_bytes: int, changed: int) -> ArchiveIndex:
    """Read the headers of an archive, once until its size or modification time changes."""
    del changed
    members: dict[str, ArchiveMember] = {}
    with open_regular(path) as file:
        try:
            with tarfile.open(fileobj=cast("BinaryIO", _BoundedFile(file)), mode="r:") as archive:
                for info in archive:
                    members[info.name] = ArchiveMember(
                        info.offset_data, info.size, _describe_non_file(info)
                    )
                    if len(members) > MAX_MEMBERS:
                        return ArchiveIndex(
                            {}, f"the archive has more than {MAX_MEMBERS} members; split it"
                        )
                end = archive.offset
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            rule = (
                "it must be a plain tar file, not a compressed one"
                if not members
                else f"it can't be read after {len(members)} members"
            )
            return ArchiveIndex(members, f"{rule} ({error})")
        file.seek(end)
        is_whole = file.read(BLOCK) == bytes(BLOCK)
    return ArchiveIndex(
        members,
        ""
        if is_whole
        else (
            f"the archive of {num_bytes} bytes is truncated or damaged after {len(members)} members"
        ),
    )


def _describe_non_file(info: tarfile.TarInfo) -> str:
    """Describe a member that is not a regular file; empty for a file."""
    if info.issym() or info.islnk():
        return f"a link to {info.linkname[:80]!r}"
    if info.issparse():
        return "a sparse file, which grows when it is read"
    return "" if info.isreg() else "a folder or device"


class _BoundedFile:
    """A file with limited reads: a header's claimed sizes are not trusted."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEAD_BYTES:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return self._read(size)
