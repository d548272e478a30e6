"""A rebuilt partition has every record at its original offset, with any gaps between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from relax_events.errors import BrokerError
from relax_events.events.container import LoggedRecord
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.partition_writer import PartitionWriter
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord

MakeTopic = Callable[..., str]
LAYOUTS = {
    "empty": ([], 0),
    "plain": ([0, 1, 2], 3),
    "a mark at the end": ([0, 1], 3),
    "marks": ([0, 2, 3, 5], 7),
    "a mark, then plain records": ([0, 1, 3, 4, 5], 6),
    "an aborted record": ([0, 3, 4], 5),
    "an aborted record behind a transaction": ([0, 1, 4], 7),
    "many hidden": ([0, 40, 41], 60),
    "purged": ([7, 8, 10], 11),
    "purged and marked": ([1, 3], 5),
    "all purged": ([], 9),
}


@pytest.fixture
def writer(connection: Connection, run_id: str) -> Iterator[PartitionWriter]:
    """Yield a writer of partitions."""
    opened = PartitionWriter(connection, transactional_id=f"{run_id}.import")
    yield opened
    opened.close()


def record(offset: int) -> LoggedRecord:
    """Return a record whose fields follow from its offset, nulls and empty ones among them."""
    key, value = (
        (None, b"", b"k%d" % offset)[offset % 3],
        (b"v%d" % offset, None, b"")[offset // 3 % 3],
    )
    headers = (("policy-version", b"%d" % offset), ("empty", b""), ("policy-version", None))[
        : offset % 4
    ]
    return LoggedRecord(
        offset, 1_600_000_000_000 + offset, key, value, headers
    )  # so old that a topic with a retention would lose it


def test_rebuild_restores_the_offset_of_every_record(
    connection: Connection, admin: Admin, make_topic: MakeTopic, writer: PartitionWriter
) -> None:
    topic = make_topic("copy", len(LAYOUTS), message_timestamp_type="CreateTime", retention_ms="-1")
    for partition, (offsets, end) in enumerate(LAYOUTS.values()):
        writer.write(topic, partition, map(record, offsets), end=end)
    topic_partitions = [(topic, partition) for partition in range(len(LAYOUTS))]
    begins, ends = admin.beginning_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    reader = LogReader(connection)
    for topic_partition, (offsets, end) in zip(topic_partitions, LAYOUTS.values(), strict=True):
        assert list(reader.stream_raw({topic_partition: (0, end)})) == [
            record(offset) for offset in offsets
        ]
        assert (begins[topic_partition], ends[topic_partition]) == ((offsets or [end])[0], end)
    reader.close()


def test_appended_records_have_consecutive_offsets(
    connection: Connection, make_topic: MakeTopic, writer: PartitionWriter
) -> None:
    topic = make_topic("copy", message_timestamp_type="CreateTime", retention_ms="-1")
    writer.append(topic, 0, map(record, [3, 9, 700]))
    reader = LogReader(connection)
    found = list(reader.stream_raw({(topic, 0): (0, 3)}))
    assert [item.offset for item in found] == [0, 1, 2]
    assert [(item.timestamp_ms, item.key, item.value, item.headers) for item in found] == [
        (item.timestamp_ms, item.key, item.value, item.headers) for item in map(record, [3, 9, 700])
    ]
    reader.close()


def test_partition_that_is_not_empty_is_refused(
    producer: RecordProducer, make_topic: MakeTopic, writer: PartitionWriter
) -> None:
    topic = make_topic("copy", message_timestamp_type="CreateTime", retention_ms="-1")
    producer.write([ProducerRecord(topic, b"of an unknown producer", partition=0)])
    with pytest.raises(
        BrokerError,
        match=r"@0: the record got offset 1; the partition was not empty, or has another producer",
    ):
        writer.write(topic, 0, [record(0)], end=1)
