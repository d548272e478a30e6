"""Reads and writes client quotas: limits on bytes, processor time and partition changes, beyond
which brokers delay responses.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_events.errors import BrokerRefused
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_array,
    encode_string,
)

DESCRIBE_CLIENT_QUOTAS, ALTER_CLIENT_QUOTAS = 48, 49
RATES = ("producer_byte_rate", "consumer_byte_rate")
REQUEST_PERCENTAGE, MUTATION_RATE = "request_percentage", "controller_mutation_rate"
DEFAULT_LOAD_QUOTAS = {REQUEST_PERCENTAGE: 200.0, MUTATION_RATE: 100.0}
"""Per principal and broker: the time of two broker threads in percent, and partitions created,
added or deleted per second."""
QUOTA_NAMES = (*RATES, *DEFAULT_LOAD_QUOTAS)
EXACT = 0


@dataclass(frozen=True, slots=True, order=True)
class QuotaEntity:
    """The subject of a quota: `kind` is `user` (the authenticated principal) or `client-id` (the
    client's own name).
    """

    kind: str
    name: str

    def encode(self) -> bytes:
        """Encode the entity for a request."""
        return encode_array([encode_string(self.kind) + encode_string(self.name)])


def read_quotas(
    connection: Connection, entities: Sequence[QuotaEntity]
) -> dict[QuotaEntity, dict[str, float]]:
    """Return the quotas of these entities by Kafka's names, without entities that have none.

    Raises:
        BrokerRefused: This principal may not read quotas.
        BrokerUnavailable: No broker responds.
    """
    with KafkaProtocolClient(connection) as client:
        return {entity: rates for entity in entities if (rates := _read_quota(client, entity))}


def _read_quota(client: KafkaProtocolClient, entity: QuotaEntity) -> dict[str, float]:
    wanted = encode_array(
        [encode_string(entity.kind) + struct.pack(">b", EXACT) + encode_string(entity.name)]
    )
    response = client.request(DESCRIBE_CLIENT_QUOTAS, 0, wanted + b"\x01")
    response.read_int32()
    _raise_on_error(response, f"reading the quota of {entity.name}")
    rates: dict[str, float] = {}
    for _ in range(response.read_int32()):
        _skip_entity(response)
        rates |= {
            str(response.read_string()): response.read_float64()
            for _ in range(response.read_int32())
        }
    return rates


def write_quotas(
    connection: Connection, entities: Sequence[QuotaEntity], quotas: Mapping[str, float | None]
) -> None:
    """Set quotas of each of these entities by Kafka's names; None removes one.

    Raises:
        BrokerRefused: This principal may not set quotas, or the broker rejects the value.
        BrokerUnavailable: No broker responds.
    """
    changes = encode_array(
        [
            encode_string(name) + struct.pack(">d?", value or 0.0, value is None)
            for name, value in quotas.items()
        ]
    )
    with KafkaProtocolClient(connection) as client:
        response = client.request(
            ALTER_CLIENT_QUOTAS,
            0,
            encode_array([entity.encode() + changes for entity in entities]) + b"\x00",
        )
        response.read_int32()
        for _ in range(response.read_int32()):
            _raise_on_error(response, "setting quotas")
            _skip_entity(response)


def _skip_entity(response: ResponseReader) -> None:
    for _ in range(2 * response.read_int32()):
        response.read_string()


def _raise_on_error(response: ResponseReader, what: str) -> None:
    code, message = response.read_int16(), response.read_string()
    if code:
        remedy = "only a super user may, or one with ALTER_CONFIGS on the cluster"
        raise BrokerRefused(f"{what}: {message or 'the broker refused'} (error {code}); {remedy}")
