"""The manifest of an exported run: the content of each file, and how to verify it."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path
from typing import Any

from relax_events.errors import CheckFailed, ConfigError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(slots=True)
class ExportedPartition:
    """One partition: its records from offset `begin` up to, not including, `end`.

    `records_digest` covers offset, time, key, value and headers of every record, without the offset
    where the topic is compacted; `file_digest` covers the file. Both are empty until the partition
    is written.
    """

    entity: str
    partition: int
    begin: int
    end: int
    is_compacted: bool
    file: str
    num_records: int = 0
    num_bytes: int = 0
    records_digest: str = ""
    file_digest: str = ""


@dataclass(slots=True)
class ExportedObject:
    """One object of the run's store."""

    key: str
    num_bytes: int
    digest: str


@dataclass(slots=True)
class Manifest:
    """The manifest of an export. It is written again after each file, so that an interrupted export
    can continue.
    """

    run_id: str
    topics: dict[str, dict[str, Any]]
    partitions: list[ExportedPartition]
    committed: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    filters: dict[str, Any] = field(default_factory=dict)
    objects_uri: str = ""
    objects: list[ExportedObject] = field(default_factory=list)
    is_complete: bool = False

    def save(self, folder: Path) -> None:
        """Write the manifest atomically."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
        fresh = folder / f"{MANIFEST}.part"
        fresh.write_text(text)
        os.replace(fresh, folder / MANIFEST)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest.

        Raises:
            ConfigError: There is none, or it has another format.
        """
        try:
            tree = json.loads((folder / MANIFEST).read_text())
            if (seen := tree.pop("format")) != FORMAT:
                raise ConfigError(
                    f"{folder / MANIFEST} has format {seen!r}, this release reads {FORMAT}; "
                    "use the release that wrote it"
                )
            tree["partitions"] = [ExportedPartition(**item) for item in tree["partitions"]]
            tree["objects"] = [ExportedObject(**item) for item in tree["objects"]]
            return cls(**tree)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{folder} holds no exported run: {error}; give the folder that relax topics "
                "export wrote"
            ) from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there as it was written.

    Raises:
        CheckFailed: A file is missing, truncated or altered, or the export was interrupted; the
            text names it.
    """
    if not manifest.is_complete:
        raise CheckFailed(
            f"the export in {folder} was interrupted; the same command continues it: "
            "relax topics export"
        )
    for item in manifest.partitions:
        path = folder / item.file
        if not path.is_file():
            raise CheckFailed(f"{path} is missing; export the run again")
        if (seen := file_sha256(path)) != item.file_digest:
            raise CheckFailed(
                f"{path} was altered: its SHA-256 must be {item.file_digest}, got {seen}; "
                "export the run again"
            )
