"""Exports of a run that another person has altered: what an import would follow, hang on or fill
the memory with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.objects.rights import MARKER
from relax_events.ops.export_manifest import MANIFEST

SPARSE_BYTES = 1 << 40
"""Of a file that takes no room on the disk."""


@dataclass(frozen=True, slots=True)
class ArchiveAttack:
    """A change of an export with one partition and one object. `alter` gets its folder and the
    manifest's tree.
    """

    name: str
    alter: Callable[[Path, dict[str, Any]], None]

    def apply(self, folder: Path) -> None:
        """Alter an export."""
        before = (folder / MANIFEST).read_text()
        tree = json.loads(before)
        self.alter(folder, tree)
        if tree != json.loads(before):
            (folder / MANIFEST).write_text(json.dumps(tree))


def _set(section: str, **values: Any) -> Callable[[Path, dict[str, Any]], None]:
    return lambda folder, tree: tree[section][0].update(values)


def _find_partition_file(folder: Path, tree: dict[str, Any]) -> Path:
    return folder / str(tree["partitions"][0]["file"])


def _find_object_file(folder: Path, tree: dict[str, Any]) -> Path:
    return folder / "objects" / str(tree["objects"][0]["key"])


Find = Callable[[Path, dict[str, Any]], Path]


def _link(find: Find) -> Callable[[Path, dict[str, Any]], None]:
    """Put the file elsewhere, and a link in its place."""

    def alter(folder: Path, tree: dict[str, Any]) -> None:
        path = find(folder, tree)
        outside = folder.parent / f"outside-{path.name}"
        path.rename(outside)
        path.symlink_to(outside)

    return alter


def _pipe(find: Find) -> Callable[[Path, dict[str, Any]], None]:
    """Put a pipe without a writer in place of the file."""

    def alter(folder: Path, tree: dict[str, Any]) -> None:
        path = find(folder, tree)
        path.unlink()
        os.mkfifo(path)

    return alter


def _sparse(find: Find) -> Callable[[Path, dict[str, Any]], None]:
    """Make the file huge."""
    return lambda folder, tree: os.truncate(find(folder, tree), SPARSE_BYTES)


def _link_parent(find: Find) -> Callable[[Path, dict[str, Any]], None]:
    return lambda folder, tree: _link(lambda *_: find(folder, tree).parent)(folder, tree)


def _num_partitions(count: Any) -> Callable[[Path, dict[str, Any]], None]:
    def alter(folder: Path, tree: dict[str, Any]) -> None:
        for topic in tree["topics"].values():
            topic["num_partitions"] = count

    return alter


def _rename_topic(name: str) -> Callable[[Path, dict[str, Any]], None]:
    def alter(folder: Path, tree: dict[str, Any]) -> None:
        (topic,) = tree["topics"].values()
        tree["topics"] = {name: topic}
        tree["partitions"][0] |= {"entity": name, "file": f"{name}/00000.avro"}

    return alter


def _manifest(folder: Path, tree: dict[str, Any]) -> Path:
    return folder / MANIFEST


PATHS = ("../outside.avro", "/etc/passwd", "a/../../outside.avro", "./00000.avro", "")
KEYS = ("../outside", "/etc/passwd", "a/../../b", MARKER, "", "a//b", ".hidden")
ATTACKS = (
    *(ArchiveAttack(f"partition at {path!r}", _set("partitions", file=path)) for path in PATHS),
    *(ArchiveAttack(f"object at {key!r}", _set("objects", key=key)) for key in KEYS),
    *(
        ArchiveAttack(f"{what} of the {name}", change(find))
        for what, change in (("link", _link), ("pipe", _pipe), ("huge file", _sparse))
        for name, find in (
            ("partition", _find_partition_file),
            ("object", _find_object_file),
            ("manifest", _manifest),
        )
    ),
    ArchiveAttack("link to the partition's folder", _link_parent(_find_partition_file)),
    ArchiveAttack("link to the object's folder", _link_parent(_find_object_file)),
    *(
        ArchiveAttack(f"{count!r} partitions", _num_partitions(count))
        for count in (10**9, 0, -1, "3", None)
    ),
    *(
        ArchiveAttack(f"partition {number!r}", _set("partitions", partition=number))
        for number in (10**9, -1, "0", 1.5, None)
    ),
    *(ArchiveAttack(f"topic {name!r}", _rename_topic(name)) for name in ("../x", "a/b", "..", "")),
    ArchiveAttack("end before its begin", _set("partitions", begin=5, end=1)),
    ArchiveAttack("end without bound", _set("partitions", end=2**63)),
    ArchiveAttack("smaller object in the manifest", _set("objects", num_bytes=1)),
)
