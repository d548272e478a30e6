"""What a user or a client may ask of the brokers, which hold back the answers of whoever asks for
more: bytes, processor time, new partitions.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_events.errors import BrokerRefused
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import Reader, Wire, array, text

DESCRIBE_CLIENT_QUOTAS, ALTER_CLIENT_QUOTAS = 48, 49
RATES = ("producer_byte_rate", "consumer_byte_rate")
REQUEST_PERCENTAGE, MUTATION_RATE = "request_percentage", "controller_mutation_rate"
USUAL_LOAD = {REQUEST_PERCENTAGE: 200.0, MUTATION_RATE: 100.0}
"""Of each principal and each broker: the time of two of its threads, and partitions made, added or
deleted per second."""
ALL = (*RATES, *USUAL_LOAD)
EXACT = 0


@dataclass(frozen=True, slots=True, order=True)
class QuotaEntity:
    """Whom a quota binds: `kind` is user (who logged in) or client-id (what a client calls
    itself).
    """

    kind: str
    name: str

    def encoded(self) -> bytes:
        """Return it as requests hold it."""
        return array([text(self.kind) + text(self.name)])


def read_quotas(
    connection: Connection, entities: Sequence[QuotaEntity]
) -> dict[QuotaEntity, dict[str, float]]:
    """Return the quotas of these entities by the broker's names; nothing for those that have none.

    Raises:
        BrokerRefused: We may not ask.
        BrokerUnavailable: No broker answers.
    """
    with Wire(connection) as wire:
        return {entity: rates for entity in entities if (rates := _read(wire, entity))}


def _read(wire: Wire, entity: QuotaEntity) -> dict[str, float]:
    wanted = array([text(entity.kind) + struct.pack(">b", EXACT) + text(entity.name)])
    answer = wire.ask(DESCRIBE_CLIENT_QUOTAS, 0, wanted + b"\x01")
    answer.take("i")
    _check(answer, f"reading the quota of {entity.name}")
    rates: dict[str, float] = {}
    for _ in range(answer.take("i")):
        _skip_entity(answer)
        rates |= {str(answer.text()): answer.take("d") for _ in range(answer.take("i"))}
    return rates


def write_quotas(
    connection: Connection, entities: Sequence[QuotaEntity], quotas: Mapping[str, float | None]
) -> None:
    """Set quotas of each of these entities, by the broker's names; None lifts one.

    Raises:
        BrokerRefused: We may not, or the broker does not take the value.
        BrokerUnavailable: No broker answers.
    """
    changes = array(
        [
            text(name) + struct.pack(">d?", value or 0.0, value is None)
            for name, value in quotas.items()
        ]
    )
    with Wire(connection) as wire:
        answer = wire.ask(
            ALTER_CLIENT_QUOTAS,
            0,
            array([entity.encoded() + changes for entity in entities]) + b"\x00",
        )
        answer.take("i")
        for _ in range(answer.take("i")):
            _check(answer, "setting quotas")
            _skip_entity(answer)


def _skip_entity(answer: Reader) -> None:
    for _ in range(2 * answer.take("i")):
        answer.text()


def _check(answer: Reader, what: str) -> None:
    code, message = answer.take("h"), answer.text()
    if code:
        remedy = "only a super user may, or one with ALTER_CONFIGS on the cluster"
        raise BrokerRefused(f"{what}: {message or 'the broker refused'} (error {code}); {remedy}")
