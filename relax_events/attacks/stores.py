"""What another writer of a store's folder could do to an object, to its folder and to the store's
marker.

Readers must refuse an object that was attacked before they read it, and must not notice an attack
afterwards: they use a copy of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

Attack = Callable[[Path], None]
KEYS_OUTSIDE = (
    "../outside",
    "weights/../../outside",
    "weights/..",
    "/etc/hostname",
    "weights//manifest",
    "./weights",
    "weights/.hidden",
    "weights/%2e%2e/outside",
    "weights\\..\\outside",
    "weights/new\nline",
    "weights/nul\0",
    "",
)
"""Names that no object may have."""


def _flip(path: Path) -> None:
    """Change every byte in place; the size stays."""
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(bytes(value ^ 0xFF for value in content))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _move_behind_link(path: Path) -> None:
    """Leave a link to the same bytes, which the attacker may still exchange."""
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target.name)


def _move_behind_folder_link(path: Path) -> None:
    folder = path.parent
    target = folder.with_name(f"{folder.name}-target")
    folder.rename(target)
    folder.symlink_to(target.name)


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _delete(path: Path) -> None:
    path.unlink()


BEFORE_READING: dict[str, Attack] = {
    "other bytes": _flip,
    "truncated": _truncate,
    "emptied": _empty,
    "longer": _lengthen,
    "a link to the same bytes": _move_behind_link,
    "its folder is a link": _move_behind_folder_link,
    "a pipe without a writer": _replace_by_pipe,
    "a link to an endless device": _replace_by_device,
    "a folder": _replace_by_folder,
    "deleted": _delete,
}
"""Attacks on an object's file before it is read, by name."""
UNHASHED = frozenset({"other bytes"})
"""Attacks that only a reader who knows the digest can notice."""
AFTER_READING: dict[str, Attack] = {
    "overwritten in place": _flip,
    "truncated": _truncate,
    "emptied": _empty,
    "deleted": _delete,
}
"""Attacks on an object's file after it was read and verified, by name."""


def keep_second_name(path: Path, name: Path) -> Path:
    """Give an object's file a second name, through which it can be changed without its folder."""
    os.link(path, name)
    return name


def link_folder(link: Path, target: Path) -> None:
    """Put a link to a folder in place of a folder of the store, to lead deletions and writers
    there.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)


def foreign_claims(run_id: str) -> dict[str, bytes]:
    """Return markers that don't make a store the run's own, by name."""
    return {
        "of another run": json.dumps({"run_id": f"{run_id}-2", "value": "0" * 32}).encode(),
        "of another cluster": json.dumps(
            {"run_id": run_id, "value": "0" * 32, "cluster_id": "elsewhere"}
        ).encode(),
        "without a value": json.dumps({"run_id": run_id}).encode(),
        "a list": b"[]",
        "no JSON": b"\xff" * 8,
        "empty": b"",
    }
