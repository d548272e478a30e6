"""Our bus: the product's own codec, producer, consumer and topic settings, on the embedded
broker."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.planes.protocol import UNDER_WAY, Got
from benchmarks.planes.samples import copy_sample, sample
from relax_events.config import BrokerConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import now_micros
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleReady
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.producer import LINGER_MS, RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord, Record
from relax_events.runtime.sample_input import next_offsets
from relax_events.topics import TopicPlan

ENTITY = "advantage.samples"
ASSIGNED_SECONDS = 30.0


def build_plan(channel: str) -> TopicPlan:
    """Return the plan of a run with default settings, named by the channel."""
    broker = BrokerConfig()
    return TopicPlan(
        channel,
        1,
        broker.partitions_per_version,
        broker.queue_partitions,
        broker.replication_factor,
        broker.compression,
    )


@cache
def open_producer(address: str) -> RecordProducer:
    """Return this process's producer, which is connected for as long as it lives, as a worker's is:
    a new one's first write takes half a second."""
    return RecordProducer(Connection(address, client_id="bench.writer"), linger_ms=LINGER_MS)


class KafkaWriter:
    """A worker's way of writing samples: encoded, keyed by prompt group, into the partition of
    group and version."""

    def __init__(self, address: str, channel: str, num_tokens: int) -> None:
        self._plan, self._codec, self._pattern = (
            build_plan(channel),
            EventCodec(),
            sample(num_tokens),
        )
        self._topic = self._plan.topic(ENTITY)
        self._admin = Admin(Connection(address, client_id=f"{channel}.writer"))
        self._admin.create([spec for spec in self._plan.specs() if spec.name == self._topic])
        self._producer = open_producer(address)

    def put(self, rows: Sequence[int], ready_at: int) -> None:
        """See `Writer.put`."""
        self._producer.write(self._records(rows, ready_at))

    def stream(self, num_samples: int) -> None:
        """See `Writer.stream`."""
        for first in range(0, num_samples, UNDER_WAY):
            for row in range(first, min(first + UNDER_WAY, num_samples)):
                self._producer.send(self._record(row, now_micros()))
            self._producer.flush()

    def drop(self) -> None:
        """See `Writer.drop`."""
        self._admin.delete([self._topic])
        self._admin.close()

    def _records(self, rows: Iterable[int], ready_at: int) -> Iterator[ProducerRecord]:
        return (self._record(row, ready_at) for row in rows)

    def _record(self, row: int, ready_at: int) -> ProducerRecord:
        event = copy_sample(self._pattern, row, ready_at)
        partition = self._plan.partition(event.prompt_group_id, event.policy_version)
        headers = {POLICY_VERSION_HEADER: str(event.policy_version)}
        return ProducerRecord(
            self._topic,
            self._codec.encode(event),
            key=event.prompt_group_id,
            partition=partition,
            headers=headers,
        )


class KafkaReader:
    """A member of a consumer group that commits finished records, as the map roles do. It is
    ready once a fetch has returned for each of its partitions: the first fetch of a new member may
    ask for some of them only, and the others wait for up to half a second then.
    """

    def __init__(self, address: str, channel: str, consumer: str) -> None:
        self._codec = EventCodec()
        plan, connection = (
            build_plan(channel),
            Connection(address, client_id=f"{channel}.{consumer}"),
        )
        self._early: list[Record] = []
        self._consumer = SubscribedConsumer(
            connection,
            consumer_group=plan.consumer_group(consumer),
            topics=[plan.topic(ENTITY)],
        )
        deadline = time.monotonic() + ASSIGNED_SECONDS
        while not self._has_fetched():
            self._early += self._consumer.fetch(1, timeout_seconds=0.1)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"consumer group {consumer} was given no partitions, or fetched none, within "
                    f"{ASSIGNED_SECONDS:g} s"
                )

    def _has_fetched(self) -> bool:
        assigned = self._consumer.positions.keys()
        return bool(assigned) and self._consumer.lag().keys() == assigned

    def _fetch(self, max_samples: int, timeout_seconds: float) -> list[Record]:
        records, self._early = self._early, []
        return records or self._consumer.fetch(max_samples, timeout_seconds=timeout_seconds)

    def get(self, max_samples: int, *, timeout_seconds: float) -> list[Got]:
        """See `Reader.get`."""
        records = self._fetch(max_samples, timeout_seconds)
        events = [
            event for record in records for event in split_samples(self._codec.decode(record.value))
        ]
        self._consumer.commit(next_offsets(records))
        return [
            Got(event.key.row, event.ready_at) for event in events if isinstance(event, SampleReady)
        ]

    def take(self, max_samples: int, *, timeout_seconds: float) -> int:
        """See `Reader.take`."""
        return len(self._fetch(max_samples, timeout_seconds))

    def close(self) -> None:
        """See `Reader.close`."""
        self._consumer.close()


class KafkaServer:
    """The embedded broker."""

    environment: Mapping[str, str] = {}

    def __init__(self, directory: Path) -> None:
        self._broker = EmbeddedBroker(directory, has_password=False)
        self.address = ""

    def start(self) -> None:
        """See `Server.start`."""
        self._broker.start()
        self.address = self._broker.bootstrap_servers

    def pids(self) -> list[int]:
        """See `Server.pids`."""
        return [self._broker.pid] if self._broker.pid else []

    def kill_storage(self) -> None:
        """See `Server.kill_storage`."""
        self._broker.kill()

    def stop(self) -> None:
        """See `Server.stop`."""
        self._broker.stop()


open_writer, open_reader = KafkaWriter, KafkaReader
