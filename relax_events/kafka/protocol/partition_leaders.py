"""Reads from each broker which broker leads a partition, by its own metadata.

A broker that is cut off from the others while clients still reach it keeps saying that it leads its
partitions. Another broker then names another leader, with a higher leader epoch. librdkafka asks
the broker that it used last, so a client that reads from one broker only asks that one.

Source: Kafka protocol guide (Metadata v7); leader epochs: KIP-101, KIP-320.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import structlog

from relax_events.errors import RelaxError
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_array,
    encode_string,
)
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
METADATA = 3
CREATE_NO_TOPIC = b"\0"
RESPONSE_SECONDS = 1.0
"""A broker that needs longer is not asked further."""


class Leader(NamedTuple):
    """The leader of a partition, as a broker's metadata names it."""

    node_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """What one broker knows: the addresses of all brokers, and the leaders of some partitions."""

    addresses: tuple[str, ...]
    leaders: Mapping[TopicPartition, Leader]


def read_metadata(connection: Connection, topics: Collection[str]) -> BrokerMetadata:
    """Read the leaders of these topics' partitions from the first broker that accepts.

    Raises:
        BrokerUnavailable: No broker responds within `RESPONSE_SECONDS`.
        BrokerRefused: The broker denies access.
        ConfigError: `KafkaProtocolClient` does not support the kind of login.
    """
    impatient = connection.with_timeout_of_at_most(RESPONSE_SECONDS)
    with KafkaProtocolClient(impatient, should_explain=False) as client:
        names = encode_array([encode_string(topic) for topic in topics])
        response = client.request(METADATA, 7, names + CREATE_NO_TOPIC)
    response.read_int32()
    addresses = response.read_array(partial(_read_broker, response))
    response.read_string()
    response.read_int32()
    topic_leaders = response.read_array(partial(_read_topic, response))
    return BrokerMetadata(
        tuple(addresses), {at: leader for part in topic_leaders for at, leader in part}
    )


def read_metadata_of_each(
    connection: Connection, topics: Collection[str]
) -> dict[str, BrokerMetadata]:
    """Return the metadata of each configured broker that responds, by its address. If one address
    is configured, which may stand for several brokers, ask the brokers that it lists. A broker that
    can't be asked, for example because it wants another kind of login, is left out.
    """
    metadata = read_metadata_from(connection, connection.addresses, topics)
    if len(connection.addresses) == 1 and metadata:
        (one,) = metadata.values()
        if len(one.addresses) > 1:
            return read_metadata_from(connection, one.addresses, topics)
    return metadata


def read_metadata_from(
    connection: Connection, addresses: Iterable[str], topics: Collection[str]
) -> dict[str, BrokerMetadata]:
    """Return the metadata of each broker of these addresses that responds."""
    metadata: dict[str, BrokerMetadata] = {}
    for address in addresses:
        try:
            metadata[address] = read_metadata(
                replace(connection, bootstrap_servers=address), topics
            )
        except RelaxError as error:
            log.debug("metadata.read_failed", address=address, error=str(error))
    return metadata


def select_newest_leaders(brokers: Iterable[BrokerMetadata]) -> dict[TopicPartition, Leader]:
    """Return each partition's leader of the highest epoch."""
    newest: dict[TopicPartition, Leader] = {}
    for metadata in brokers:
        for at, leader in metadata.leaders.items():
            if at not in newest or leader.epoch > newest[at].epoch:
                newest[at] = leader
    return newest


def find_outdated(
    brokers: Mapping[str, BrokerMetadata], newest: Mapping[TopicPartition, Leader]
) -> frozenset[str]:
    """Return the addresses of the brokers that name a leader of an older epoch."""
    return frozenset(
        address
        for address, metadata in brokers.items()
        if any(leader.epoch < newest[at].epoch for at, leader in metadata.leaders.items())
    )


def format_address(host: str, port: int) -> str:
    """Return `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_broker(response: ResponseReader) -> str:
    response.read_int32()
    host, port = response.read_string(), response.read_int32()
    response.read_string()
    return format_address(host or "", port)


def _read_topic(response: ResponseReader) -> list[tuple[TopicPartition, Leader]]:
    response.read_int16()
    topic = response.read_string() or ""
    response.read_int8()
    return [
        ((topic, partition), leader)
        for partition, leader in response.read_array(partial(_read_partition, response))
    ]


def _read_partition(response: ResponseReader) -> tuple[int, Leader]:
    response.read_int16()
    partition, leader = response.read_int32(), Leader(response.read_int32(), response.read_int32())
    for _replicas in ("all", "in sync", "offline"):
        response.read_array(response.read_int32)
    return partition, leader
