"""librdkafka ignores the timeout with which offsets are added to a transaction.

Seen with: librdkafka 2.16.0. Report: https://github.com/confluentinc/librdkafka/issues/5456.

The call may never return after the coordinator's restart. Here a thread makes the call and is
abandoned at the deadline together with its producer, which the next producer fences.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from relax_events.deadline import STALL_SECONDS
from relax_events.errors import BrokerUnavailable
from relax_events.events.parts import TopicOffset
from relax_events.kafka.log_reader import LogReader

OFFSETS_SECONDS = 4.0


def add_offsets(producer: Any, offsets: Sequence[TopicOffset], reader: LogReader) -> None:
    """Add offsets to the open transaction, within our own deadline.

    Raises:
        BrokerUnavailable: The coordinator did not respond in time.
    """
    partitions = [
        ClientPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
    ]
    metadata = reader.group_metadata()
    answer: queue.SimpleQueue[KafkaException | None] = queue.SimpleQueue()

    def call() -> None:
        try:
            producer.send_offsets_to_transaction(partitions, metadata, OFFSETS_SECONDS)
        except KafkaException as exception:
            answer.put(exception)
        else:
            answer.put(None)

    threading.Thread(target=call, name="transaction-offsets", daemon=True).start()
    if (failure := await_result(answer)) is not None:
        raise failure


def await_result(answer: queue.SimpleQueue[KafkaException | None]) -> KafkaException | None:
    """Wait for the thread's result; a second time if this process itself was suspended.

    A zombie that was suspended here thus learns that it was fenced, instead of fencing its
    successor with a new producer.

    Raises:
        BrokerUnavailable: No result arrived in time.
    """
    limit = OFFSETS_SECONDS + 1
    for _ in range(2):
        started = time.monotonic()
        try:
            return answer.get(timeout=limit)
        except queue.Empty:
            if time.monotonic() - started < limit + STALL_SECONDS:
                break
    raise BrokerUnavailable(
        f"adding offsets to a transaction: no answer within {limit:g} s"
    ) from None
