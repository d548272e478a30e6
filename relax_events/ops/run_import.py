"""Imports a run from exported files: the same records at the same offsets, under a new run id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import orjson

from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused, CheckFailed, ConfigError
from relax_events.events.codec import EventCodec
from relax_events.events.container import RecordsDigest, read_records
from relax_events.events.parts import TopicOffset, now_micros
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.partition_writer import PartitionWriter
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.objects import ObjectStore
from relax_events.objects.marker import claim_store
from relax_events.ops.export_manifest import (
    ExportedPartition,
    Manifest,
    open_partition,
    read_object,
    verify_files,
)
from relax_events.ops.topic_apply import apply_groups
from relax_events.runtime.run_description import read_description
from relax_events.topics import TopicPlan, TopicSpec
from relax_events.topics.names import COMMANDS, PROMPT_GROUPS, SCHEMAS
from relax_events.topics.partitions import TopicPartition

Report = Callable[[str], None]
IMPORT_SETTINGS = {"message.timestamp.type": "CreateTime"}
"""Records keep their times while they are written; afterwards the broker's clock is used again.
Therefore the setting also marks topics whose import is unfinished.
"""


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The changes of an import: topics to create, partitions to write; complete ones are left
    alone.

    `unfinished` are topics of an interrupted import: they are created again.
    """

    specs: list[TopicSpec]
    partitions: list[ExportedPartition]
    num_present: int
    unfinished: list[str]

    @property
    def num_records(self) -> int:
        """Number of records to write."""
        return sum(item.num_records for item in self.partitions)


def plan_import(config: RunConfig, admin: Admin, manifest: Manifest) -> ImportPlan:
    """Return the changes of an import.

    Raises:
        ConfigError: The run file gives the topics another shape than the export has.
        BrokerRefused: The run has records of its own already.
    """
    plan = TopicPlan.from_config(config)
    specs = [_topic_spec(plan, entity, topic) for entity, topic in manifest.topics.items()]
    topic_states = admin.topics(plan.topic(""))
    unfinished = [
        spec.name
        for spec in specs
        if spec.name in topic_states
        and topic_states[spec.name].settings.items() >= IMPORT_SETTINGS.items()
    ]
    present = [
        item
        for item in manifest.partitions
        if plan.topic(item.entity) in topic_states.keys() - unfinished
    ]
    ends = admin.end_offsets((plan.topic(item.entity), item.partition) for item in present)
    done = []
    for item in present:
        end = ends[plan.topic(item.entity), item.partition]
        if item.entity == COMMANDS and end > item.end:
            end = item.end  # the description of the new run lies behind the copied records
        if end and end != (item.num_records if item.is_compacted else item.end):
            topic_partition = f"{plan.topic(item.entity)}[{item.partition}]"
            raise BrokerRefused(
                f"{topic_partition} holds other records: it ends at {end}; give another "
                "--run-id, or delete that run first"
            )
        if end or not item.end:
            done.append(item)
    todo = [item for item in manifest.partitions if item not in done]
    return ImportPlan(specs, todo, len(done), unfinished)


def _topic_spec(plan: TopicPlan, entity: str, topic: dict[str, object]) -> TopicSpec:
    planned = {spec.name: spec for spec in plan.specs()}
    spec = planned.get(plan.topic(entity))
    if spec is None:  # not in the plan, for example a rescoring's: the sample topics' settings fit
        first = planned[plan.sample_topics()[0]]
        spec = TopicSpec(
            plan.topic(entity),
            _checked_partitions(entity, topic, planned.values()),
            first.replication_factor,
            entity,
            first.settings,
        )
    if spec.num_partitions != topic["num_partitions"]:
        keys = (
            "broker.queue_partitions"
            if entity == PROMPT_GROUPS
            else "run.max_staleness and broker.partitions_per_version"
        )
        shape = (
            f"{topic['num_partitions']} partitions in the export and {spec.num_partitions} by "
            "the run file"
        )
        raise ConfigError(f"topic {entity} has {shape}; give {keys} as the exported run had them")
    return spec


def _checked_partitions(
    entity: str, topic: Mapping[str, object], planned: Iterable[TopicSpec]
) -> int:
    """Return how many partitions a topic gets that the run file does not know."""
    num_partitions = int(str(topic["num_partitions"]))
    most = max(spec.num_partitions for spec in planned)
    if num_partitions > most:
        raise ConfigError(
            f"topic {entity} has {num_partitions} partitions in the export, and the largest topic "
            f"of the run file has {most}; give the run file of the exported run"
        )
    return num_partitions


def import_run(
    config: RunConfig,
    admin: Admin,
    folder: Path,
    manifest: Manifest,
    plan: ImportPlan,
    *,
    report: Report,
) -> None:
    """Write the planned partitions, then the consumer groups' offsets and the objects.

    Args:
        config: The new run, with the broker's address filled in.
        admin: Of its broker.
        folder: Of the export.
        manifest: Of the export.
        plan: As `plan_import` returned it.
        report: Called with a line for each finished part.
    Raises:
        CheckFailed: A file is altered.
        BrokerError: Another process writes to the run, or the broker refuses.
    """
    verify_files(folder, manifest)
    topics = TopicPlan.from_config(config)
    admin.delete(plan.unfinished)
    present = admin.topics(topics.topic(""))
    admin.create(
        [
            replace(spec, settings=spec.settings | IMPORT_SETTINGS)
            for spec in plan.specs
            if spec.name not in present
        ]
    )
    for spec in plan.specs:
        if spec.name in present:
            admin.alter_topic(spec.name, IMPORT_SETTINGS)
    writer = PartitionWriter(
        _connection(config), transactional_id=topics.transactional_id("import")
    )
    try:
        for item in plan.partitions:
            with open_partition(folder, item) as file:
                _write_partition(writer, topics.topic(item.entity), item, file)
            report(f"{topics.topic(item.entity)}[{item.partition}]: {item.num_records} records")
    finally:
        writer.close()
    for spec in plan.specs:
        admin.alter_topic(spec.name, spec.settings)
    _set_groups(config, topics, admin, manifest)
    _put_objects(config, folder, manifest, report)
    _describe(config, topics, manifest)


def _write_partition(
    writer: PartitionWriter, topic: str, item: ExportedPartition, file: BinaryIO
) -> None:
    records = read_records(file, Path(item.file))
    if item.is_compacted:
        writer.append(topic, item.partition, records)
    else:
        writer.write(topic, item.partition, records, end=item.end)


def verify_import(config: RunConfig, manifest: Manifest) -> None:
    """Read the run back and compare it with the export, record by record.

    Raises:
        CheckFailed: A partition differs; the text names it.
    """
    topics, reader = TopicPlan.from_config(config), LogReader(_connection(config))
    try:
        for item in manifest.partitions:
            _verify_partition(reader, (topics.topic(item.entity), item.partition), item)
    finally:
        reader.close()


def _verify_partition(
    reader: LogReader, topic_partition: TopicPartition, item: ExportedPartition
) -> None:
    what, end = (
        f"{topic_partition[0]}[{topic_partition[1]}] is not as exported",
        reader.watermarks(*topic_partition)[1],
    )
    if not item.is_compacted and (end < item.end or (end > item.end and item.entity != COMMANDS)):
        raise CheckFailed(f"{what}: it ends at {end} instead of {item.end}")
    digest = RecordsDigest(with_offsets=not item.is_compacted)
    for record in reader.stream_raw({topic_partition: (0, end if item.is_compacted else item.end)}):
        digest.add(record)
    if digest.hex() != item.records_digest:
        raise CheckFailed(
            f"{what}: {digest.num_records} records instead of {item.num_records}, or others"
        )


def _connection(config: RunConfig) -> Connection:
    return Connection.from_config(config.broker, client_id=f"{config.run.id}.import")


def _set_groups(config: RunConfig, topics: TopicPlan, admin: Admin, manifest: Manifest) -> None:
    apply_groups(config, topics, admin)
    for role, offsets in manifest.committed.items():
        imported = [
            TopicOffset(topics.topic(entity), partition, offset)
            for entity, partition, offset in offsets
            if entity in manifest.topics
        ]
        if imported:
            admin.set_committed_offsets(topics.consumer_group(role), imported)


def _describe(config: RunConfig, topics: TopicPlan, manifest: Manifest) -> None:
    """Write the description of the new run: the old run's, with the new id and objects."""
    if COMMANDS not in manifest.topics:
        return
    reader = LogReader(_connection(config))
    try:
        cluster_id = reader.cluster_id(topics.topic(COMMANDS))
        described_before = (
            read_description(reader, config.run.id) if SCHEMAS in manifest.topics else None
        )
    finally:
        reader.close()
    if described_before is None:
        return
    tree = orjson.loads(described_before.config)
    tree["run"] |= {"id": config.run.id, "directory": str(config.run.directory.resolve())}
    former = tree.get("objects", {})
    if manifest.objects:
        uri_aliases = [*former.get("uri_aliases", ()), manifest.objects_uri]
        tree["objects"] = former | {
            "uri": config.objects.uri,
            "by_run": config.objects.by_run,
            "uri_aliases": uri_aliases,
        }
        mark = claim_store(
            ObjectStore.open(config.objects_uri), run_id=config.run.id, cluster_id=cluster_id
        ).value
    else:
        tree["objects"] = former | {"uri": manifest.objects_uri, "by_run": False}
        mark = described_before.store_marker
    text = orjson.dumps(tree, option=orjson.OPT_SORT_KEYS).decode()
    described = replace(
        described_before,
        store_marker=mark,
        run_id=config.run.id,
        config=text,
        described_at=now_micros(),
    )
    if described.config != described_before.config:
        producer = RecordProducer(_connection(config))
        producer.write([ProducerRecord(topics.topic(COMMANDS), EventCodec().encode(described))])
        producer.close()


def _put_objects(config: RunConfig, folder: Path, manifest: Manifest, report: Report) -> None:
    if not manifest.objects:
        return
    store = ObjectStore.open(config.objects_uri)
    for item in manifest.objects:
        store.put_at(item.key, read_object(folder, item))
    report(f"objects: {len(manifest.objects)} in {store.uri('')}")
