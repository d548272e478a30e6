"""The manifest of an exported run: the content of each file, and how to verify it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from functools import cache
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from relax_events.errors import CheckFailed, ConfigError
from relax_events.objects.local_files import KEY_PATTERN
from relax_events.objects.rights import MARKER
from relax_events.regular_files import open_below

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 * 1024**2
"""Of 300,000 objects and partitions."""
MAX_PARTITIONS = 10_000
"""Of a topic."""
MAX_HEAD_BYTES, MAX_RECORD_OVERHEAD_BYTES = 1024**2, 1024
"""Maximum bytes of a partition's file in addition to its records: its head, and for each record
offset, time and lengths. Packed records may be a little longer than the records themselves."""
ENTITY = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)*")
Count = Annotated[int, Field(ge=0, lt=2**53)]
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(slots=True)
class ExportedPartition:
    """One partition: its records from offset `begin` up to, not including, `end`.

    `records_digest` covers offset, time, key, value and headers of every record, without the offset
    where the topic is compacted; `file_digest` covers the file. Both are empty until the partition
    is written.
    """

    __pydantic_config__ = STRICT

    entity: str
    partition: Count
    begin: Count
    end: Count
    is_compacted: bool
    file: str
    num_records: Count = 0
    num_bytes: Count = 0
    records_digest: str = ""
    file_digest: str = ""


@dataclass(slots=True)
class ExportedObject:
    """One object of the run's store."""

    __pydantic_config__ = STRICT

    key: str
    num_bytes: Count
    digest: str


@dataclass(slots=True)
class Manifest:
    """The manifest of an export. It is written again after each file, so that an interrupted export
    can continue.
    """

    __pydantic_config__ = STRICT

    run_id: str
    topics: dict[str, dict[str, Any]]
    partitions: list[ExportedPartition]
    committed: dict[str, list[tuple[str, Count, Count]]] = field(default_factory=dict)
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
            ConfigError: It is missing, has another format, or has values that no export writes.
        """
        try:
            tree = json.loads(_read_manifest(folder))
            if (seen := tree.pop("format")) != FORMAT:
                raise ConfigError(
                    f"{folder / MANIFEST} has format {seen!r}, this release reads {FORMAT}; "
                    "use the release that wrote it"
                )
            manifest: Manifest = _adapter().validate_json(json.dumps(tree))
            _require_valid(manifest)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{folder / MANIFEST} is no manifest of an export: {key}: {first['msg']}, got "
                f"{first['input']!r:.60}; give the folder that relax topics export wrote"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{folder} holds no exported run: {error}; give the folder that relax topics "
                "export wrote"
            ) from error
        return manifest


def _read_manifest(folder: Path) -> bytes:
    with open_below(folder, MANIFEST) as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    return text


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def partition_file(entity: str, partition: int) -> str:
    """Return the path of a partition's file in the folder of an export."""
    return f"{entity}/{partition:05d}.avro"


def _require_valid(manifest: Manifest) -> None:
    """Refuse a manifest with paths, keys or partitions that no export writes.

    Raises:
        ValueError: A path, key or partition is invalid; the text names the first.
    """
    for entity, topic in manifest.topics.items():
        num_partitions = topic.get("num_partitions")
        if not ENTITY.fullmatch(entity) or type(num_partitions) is not int:
            raise ValueError(f"topic {entity[:80]!r} has no valid name or number of partitions")
        if not 0 < num_partitions <= MAX_PARTITIONS:
            raise ValueError(
                f"topic {entity} has {num_partitions} partitions; between 1 and {MAX_PARTITIONS} "
                "may be"
            )
    for item in manifest.partitions:
        topic_size = manifest.topics.get(item.entity, {}).get("num_partitions", 0)
        if item.partition >= topic_size or item.begin > item.end:
            raise ValueError(
                f"{item.entity[:80]!r}[{item.partition}] is no partition of its topics, or ends at "
                f"{item.end} before it begins at {item.begin}"
            )
        if item.file != (usual := partition_file(item.entity, item.partition)):
            raise ValueError(f"the file of a partition is {usual}, got {item.file[:80]!r}")
    for entry in manifest.objects:
        if not KEY_PATTERN.fullmatch(entry.key) or entry.key == MARKER:
            raise ValueError(
                f"{entry.key[:80]!r} can't name an exported object: it must be a key of a store, "
                f"and not {MARKER}"
            )


def open_partition(folder: Path, item: ExportedPartition) -> BufferedReader:
    """Open the file of a partition.

    Raises:
        CheckFailed: It is missing, larger than it was written, or no regular file of the folder.
    """
    most = MAX_HEAD_BYTES + 2 * item.num_bytes + item.num_records * MAX_RECORD_OVERHEAD_BYTES
    return _open_bounded(folder, item.file, most)


def open_object(folder: Path, item: ExportedObject) -> BufferedReader:
    """Open the file of an object; raises as `open_partition`."""
    return _open_bounded(folder, f"objects/{item.key}", item.num_bytes)


def read_object(folder: Path, item: ExportedObject) -> bytes:
    """Return an object as it was written; raises as `open_partition`, or if it was altered."""
    with open_object(folder, item) as file:
        _require_digest(file, folder / "objects" / item.key, item.digest)
        file.seek(0)
        return file.read(item.num_bytes)


def _open_bounded(folder: Path, name: str, max_bytes: int) -> BufferedReader:
    try:
        file = open_below(folder, name)
    except OSError as error:
        raise CheckFailed(
            f"{folder / name} can't be read: {error.strerror}; export the run again"
        ) from None
    if (num_bytes := os.fstat(file.fileno()).st_size) > max_bytes:
        file.close()
        raise CheckFailed(
            f"{folder / name} was altered: it has {num_bytes} bytes, and at most {max_bytes} "
            "were written; export the run again"
        )
    return file


def _require_digest(file: BufferedReader, path: Path, digest: str) -> None:
    if (seen := file_digest(file, "sha256").hexdigest()) != digest:
        raise CheckFailed(
            f"{path} was altered: its SHA-256 must be {digest}, got {seen}; export the run again"
        )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Check that every partition's file is there as it was written, and every object's with its
    size.

    Raises:
        CheckFailed: A file is missing, truncated, altered or no regular file of the folder, or the
            export was interrupted; the text names it.
    """
    if not manifest.is_complete:
        raise CheckFailed(
            f"the export in {folder} was interrupted; the same command continues it: "
            "relax topics export"
        )
    for item in manifest.partitions:
        with open_partition(folder, item) as file:
            _require_digest(file, folder / item.file, item.file_digest)
    for entry in manifest.objects:
        open_object(folder, entry).close()
