"""The smallest export of a run, and reading it as an import does."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

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
from relax_events.topics.names import SCHEMAS

ENTITY, KEY, OBJECT = SCHEMAS, "media/a.png", b"an object"
RECORDS = [LoggedRecord(offset, 0, b"k", bytes(1000), (("h", None),)) for offset in range(3)]


def write_export(folder: Path) -> Manifest:
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


def read_export(folder: Path) -> tuple[list[LoggedRecord], bytes]:
    """Read an export as an import does."""
    manifest = Manifest.load(folder)
    verify_files(folder, manifest)
    (item,), (entry,) = manifest.partitions, manifest.objects
    with open_partition(folder, item) as file:
        records = list(read_records(file, folder / item.file))
    return records, read_object(folder, entry)
