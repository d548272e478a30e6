"""Reads the state of a transactional id from its coordinator, and completes partitions that the
coordinator forgot.

librdkafka offers neither request.

Source: Kafka protocol guide (DescribeTransactions v0, AddPartitionsToTxn v0, AddOffsetsToTxn v0,
EndTxn v0).
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from relax_events.errors import BrokerError, BrokerUnavailable, Fenced
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_array,
    encode_compact_string,
    encode_string,
)
from relax_events.kafka.protocol.group_membership import (
    NOT_READY,
    TRANSACTION_COORDINATOR,
    find_coordinators,
)
from relax_events.topics.partitions import TopicPartition

ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, DESCRIBE_TRANSACTIONS = 24, 25, 26, 65
OLD_EPOCH = {47, 90}  # another producer has taken over the transactional id
CONCURRENT_TRANSACTIONS, NO_TRANSACTIONAL_ID = 51, 105
ONE_ID, NO_TAGS = b"\x02", b"\0"
ONGOING, COMMITTED = "Ongoing", "CompleteCommit"
DECIDED = {COMMITTED, "CompleteAbort", "Empty"}


@dataclass(frozen=True, slots=True)
class TransactionState:
    """What the coordinator knows of a transactional id's last transaction."""

    name: str
    """The coordinator's name of the state, for example `PrepareCommit`."""
    producer_id: int
    producer_epoch: int
    coordinator: Connection
    """The broker that answered."""

    @property
    def is_decided(self) -> bool:
        """Whether no transaction is open and the coordinator has no more markers to write."""
        return self.name in DECIDED

    @property
    def is_committed(self) -> bool:
        """Whether the last transaction was committed."""
        return self.name == COMMITTED


def read_transaction_state(
    connection: Connection, transactional_id: str
) -> TransactionState | None:
    """Return a transactional id's state; None when the coordinator does not know it.

    Raises:
        BrokerUnavailable: A coordinator is unavailable or not ready.
        BrokerError: A coordinator refuses the request.
    """
    coordinators = find_coordinators(connection, transactional_id, kind=TRANSACTION_COORDINATOR)
    answers = [_ask(coordinator, transactional_id) for coordinator in coordinators]
    return find_furthest([state for state in answers if state is not None])


def find_furthest(states: Collection[TransactionState]) -> TransactionState | None:
    """Return the state of the true coordinator, among what several brokers say of a transactional
    id: a broker that is isolated from the others answers as the coordinator that it was, and never
    completes anything.

    Raises:
        BrokerUnavailable: They name different producers, of which either may be the newer one.
    """
    if len({state.producer_id for state in states}) > 1:
        raise BrokerUnavailable(
            "two brokers take themselves for the coordinator of one transactional id; check that "
            "all brokers reach each other"
        )
    return max(
        states,
        key=lambda state: (state.producer_epoch, state.is_decided, state.name != ONGOING),
        default=None,
    )


def finish_transaction(
    transactional_id: str,
    state: TransactionState,
    partitions: Collection[TopicPartition],
    *,
    consumer_group: str,
    commits: bool,
) -> None:
    """Commit or abort an empty transaction of these partitions and of a group's offsets (not if its
    name is empty): its markers decide over all that the producer wrote there and is undecided.

    Raises:
        Fenced: Another producer has taken over the transactional id.
        BrokerUnavailable: The coordinator is unavailable or not ready.
        BrokerError: The coordinator refuses a request.
    """
    what = f"completing the last transaction of {transactional_id}"
    producer = encode_string(transactional_id) + struct.pack(
        ">qh", state.producer_id, state.producer_epoch
    )
    topics = [
        encode_string(topic)
        + encode_array([struct.pack(">i", number) for name, number in partitions if name == topic])
        for topic in sorted({topic for topic, _ in partitions})
    ]
    with KafkaProtocolClient(state.coordinator) as client:
        response = client.request(ADD_PARTITIONS_TO_TXN, 0, producer + encode_array(topics))
        response.read_int32()
        for _ in range(response.read_int32()):
            response.read_string()
            for _ in range(response.read_int32()):
                response.read_int32()
                _check(response.read_int16(), what)
        if consumer_group:
            response = client.request(
                ADD_OFFSETS_TO_TXN, 0, producer + encode_string(consumer_group)
            )
            response.read_int32()
            _check(response.read_int16(), what)
        response = client.request(END_TXN, 0, producer + struct.pack(">b", commits))
        response.read_int32()
        _check(response.read_int16(), what)


def _ask(coordinator: Connection, transactional_id: str) -> TransactionState | None:
    body = ONE_ID + encode_compact_string(transactional_id) + NO_TAGS
    with KafkaProtocolClient(coordinator) as client:
        response = client.request(DESCRIBE_TRANSACTIONS, 0, body, is_flexible=True)
    response.read_int32()
    (state,) = response.read_compact_array(partial(_read_state, response, coordinator))
    return state


def _read_state(response: ResponseReader, coordinator: Connection) -> TransactionState | None:
    error, name, state = (
        response.read_int16(),
        response.read_compact_string(),
        response.read_compact_string(),
    )
    _timeout_ms, _started_ms = response.read_int32(), response.read_int64()
    producer_id, epoch = response.read_int64(), response.read_int16()
    if error == NO_TRANSACTIONAL_ID:
        return None
    _check(error, f"reading the state of {name}")
    return TransactionState(state or "", producer_id, epoch, coordinator)


def _check(error: int, what: str) -> None:
    if error in OLD_EPOCH:
        raise Fenced(f"{what}: another instance of this role has taken over; end this one")
    if error in NOT_READY or error == CONCURRENT_TRANSACTIONS:
        raise BrokerUnavailable(f"{what}: the coordinator is not ready (error {error})")
    if error:
        raise BrokerError(f"{what} failed (error {error}); see the broker's log")
