"""Exports a run's records into files, byte for byte, streaming; complete files are not written
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from relax_events.config import RunConfig, RunSection
from relax_events.errors import ConfigError
from relax_events.events.container import ContainerWriter, LoggedRecord, RecordsDigest
from relax_events.history.run_log import RunLog
from relax_events.history.samples.filter import integer_range, parse_bounds
from relax_events.kafka.admin import Admin
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import POLICY_VERSION_HEADER
from relax_events.objects import ObjectStore
from relax_events.objects.rights import MARKER
from relax_events.ops.export_manifest import (
    MANIFEST,
    ExportedObject,
    ExportedPartition,
    Manifest,
    file_sha256,
    partition_file,
)
from relax_events.topics.names import SAMPLE_TOPICS
from relax_events.topics.partitions import TopicPartition
from relax_events.topics.plan import list_input_partitions, list_role_inputs

NO_VERSION = 2**31
"""Above all policy versions."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExportFilter:
    """Selects topics and versions. Control topics are small and always exported completely."""

    entities: tuple[str, ...] = ()
    versions: range | None = None

    def includes_topic(self, entity: str) -> bool:
        """Return whether a topic is exported; without names, all are."""
        return not self.entities or entity in self.entities

    def includes_record(self, record: LoggedRecord) -> bool:
        """Return whether a sample's record is of a wanted version; one without a version is
        included.
        """
        if self.versions is None:
            return True
        text = next(
            (value or b"" for name, value in record.headers if name == POLICY_VERSION_HEADER), b""
        )
        return not text.isdigit() or int(text) in self.versions

    def describe(self) -> dict[str, object]:
        """Return the filter for the manifest."""
        versions = None if self.versions is None else [self.versions.start, self.versions.stop - 1]
        return {"entities": sorted(self.entities), "versions": versions}


def parse_versions(text: str) -> range | None:
    """Parse 3, 3..7, 3.. or ..7; None for an empty text.

    Raises:
        ConfigError: The text is malformed.
    """
    low, high = parse_bounds(text, flag="--version")
    return integer_range(max(low, 0), min(high, NO_VERSION)) if text else None


def export_run(
    config: RunConfig,
    admin: Admin,
    folder: Path,
    selection: ExportFilter,
    *,
    with_objects: bool,
    report: Report,
) -> Manifest:
    """Export a run into a folder and return its manifest.

    Each file is written atomically; an interrupted export continues with the end offsets that it
    had found.

    Args:
        config: The run, with the broker's address filled in.
        admin: Of its broker.
        folder: Created if missing.
        selection: The topics and versions to export.
        with_objects: Copy the run's object store too: weights, checkpoints, media.
        report: Called with a line for each finished file.
    Raises:
        ConfigError: The folder holds another export, or the run has no such topic.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with RunLog(config, name="export") as log:
        manifest = _load_started(folder, config.run, selection) or _plan_export(
            config, admin, log, selection
        )
        manifest.save(folder)
        reader = LogReader(log.connection)
        try:
            for item in manifest.partitions:
                if not _is_written(folder, item):
                    _write(
                        folder,
                        item,
                        reader,
                        (log.plan.topic(item.entity), item.partition),
                        selection,
                    )
                    manifest.save(folder)
                    report(f"{item.file}: {item.num_records} records, {item.num_bytes} bytes")
        finally:
            reader.close()
    if with_objects:
        _copy_objects(config, folder, manifest, report)
    manifest.is_complete = True
    manifest.save(folder)
    return manifest


def _load_started(folder: Path, run: RunSection, selection: ExportFilter) -> Manifest | None:
    if not (folder / MANIFEST).exists():
        return None
    manifest = Manifest.load(folder)
    if manifest.run_id != run.id or manifest.filters != selection.describe():
        raise ConfigError(
            f"{folder} holds an export of run {manifest.run_id} with filters "
            f"{manifest.filters}; name another folder"
        )
    return manifest


def _plan_export(config: RunConfig, admin: Admin, log: RunLog, selection: ExportFilter) -> Manifest:
    """Fix the end offsets: control topics first, so that everything they name lies below the sample
    topics' end offsets.
    """
    states = {
        log.plan.parse_entity(name): state
        for name, state in admin.topics(log.plan.topic("")).items()
    }
    if missing := sorted(set(selection.entities) - states.keys()):
        raise ConfigError(
            f"run {config.run.id} has no topic {missing[0]!r}; it has {', '.join(sorted(states))}"
        )
    spans: dict[TopicPartition, tuple[int, int]] = {}
    for entity in sorted(
        filter(selection.includes_topic, states),
        key=lambda entity: (not entity.startswith("control."), entity),
    ):
        spans |= _spans(admin, log, entity, states[entity].num_partitions, selection)
    partitions = [
        ExportedPartition(
            entity := log.plan.parse_entity(topic),
            partition,
            begin,
            end,
            "compact" in states[entity].settings.get("cleanup.policy", ""),
            partition_file(entity, partition),
        )
        for (topic, partition), (begin, end) in spans.items()
    ]
    topics: dict[str, dict[str, Any]] = {
        entity: {"num_partitions": state.num_partitions, "settings": dict(state.settings)}
        for entity, state in states.items()
        if selection.includes_topic(entity)
    }
    return Manifest(
        config.run.id,
        topics,
        partitions,
        _committed(config, admin, log),
        selection.describe(),
        config.objects_uri,
    )


def _spans(
    admin: Admin, log: RunLog, entity: str, num_partitions: int, selection: ExportFilter
) -> dict[TopicPartition, tuple[int, int]]:
    """Return the offset range of each partition; with versions given, only the range between their
    starts.
    """
    topic_partitions = [(log.plan.topic(entity), partition) for partition in range(num_partitions)]
    begins, ends = (
        admin.beginning_offsets(topic_partitions),
        admin.last_stable_offsets(topic_partitions),
    )
    spans = {
        topic_partition: (begins[topic_partition], ends[topic_partition])
        for topic_partition in topic_partitions
    }
    if selection.versions is None or entity not in SAMPLE_TOPICS:
        return spans
    owned = log.offset_ranges(
        entity,
        range(selection.versions.start, min(selection.versions.stop, log.newest_version + 1)),
    )
    return {
        topic_partition: _intersect(span, owned.get(topic_partition, (span[1], span[1])))
        for topic_partition, span in spans.items()
    }


def _intersect(span: tuple[int, int], owned: tuple[int, int]) -> tuple[int, int]:
    return min(max(span[0], owned[0]), span[1]), min(span[1], max(owned[1], span[0]))


def _committed(
    config: RunConfig, admin: Admin, log: RunLog
) -> dict[str, list[tuple[str, int, int]]]:
    """Return the committed offsets of every role, as (entity, partition, offset)."""
    committed = {}
    for role in list_role_inputs(config):
        offsets = admin.committed_offsets(
            log.plan.consumer_group(role), list_input_partitions(config, role)
        )
        committed[role] = [
            (log.plan.parse_entity(topic), partition, offset)
            for (topic, partition), offset in sorted(offsets.items())
        ]
    return committed


def _is_written(folder: Path, item: ExportedPartition) -> bool:
    return bool(item.file_digest) and (folder / item.file).is_file()


def _write(
    folder: Path,
    item: ExportedPartition,
    reader: LogReader,
    topic_partition: TopicPartition,
    selection: ExportFilter,
) -> None:
    path = folder / item.file
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    digest = RecordsDigest(with_offsets=not item.is_compacted)
    with ContainerWriter(fresh) as writer:
        for record in _chosen(
            reader, {topic_partition: (item.begin, item.end)}, item.entity, selection
        ):
            writer.write(record)
            digest.add(record)
    os.replace(fresh, path)
    item.num_records, item.num_bytes, item.records_digest = (
        digest.num_records,
        digest.num_bytes,
        digest.hex(),
    )
    item.file_digest = file_sha256(path)


def _chosen(
    reader: LogReader,
    spans: dict[TopicPartition, tuple[int, int]],
    entity: str,
    selection: ExportFilter,
) -> Iterator[LoggedRecord]:
    records = reader.stream_raw(spans)
    return filter(selection.includes_record, records) if entity in SAMPLE_TOPICS else records


def _copy_objects(config: RunConfig, folder: Path, manifest: Manifest, report: Report) -> None:
    """Copy every object that is missing in the folder."""
    store = ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases)
    manifest.objects_uri = store.uri("")
    copied_keys: Collection[str] = {item.key for item in manifest.objects}
    for key in store.list(""):
        if key in copied_keys or key == MARKER:
            continue
        data = store.get_at(key)
        path = folder / "objects" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.part")
        fresh.write_bytes(data)
        os.replace(fresh, path)
        manifest.objects.append(ExportedObject(key, len(data), sha256(data).hexdigest()))
    manifest.save(folder)
    report(f"objects: {len(manifest.objects)} of {manifest.objects_uri}")
