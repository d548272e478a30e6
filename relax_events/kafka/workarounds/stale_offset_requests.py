"""librdkafka's admin client finds no offsets after a broker's restart.

Seen with: librdkafka 2.16.0. Report: none.

A restarted broker rejects the client's cached partition metadata, and the client never refreshes
it; while the broker restarts, the request may also succeed without an offset. Each retry therefore
uses a new client, and an absent offset counts as an unavailable broker.
"""

from __future__ import annotations

from confluent_kafka import OFFSET_INVALID
from confluent_kafka.admin import AdminClient

from relax_events.errors import BrokerUnavailable
from relax_events.kafka.connection import Connection


def renew_client(connection: Connection) -> AdminClient:
    """Return a client without cached metadata."""
    return AdminClient(connection.settings())


def check_answered(offset: int, what: str) -> int:
    """Return an offset that the broker returned; `what` names the attempted operation.

    Raises:
        BrokerUnavailable: The response has none.
    """
    if offset == OFFSET_INVALID:
        raise BrokerUnavailable(f"{what}: no answer; see that the broker runs")
    return offset
