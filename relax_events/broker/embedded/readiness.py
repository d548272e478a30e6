"""Wait until a starting broker serves: its port accepts, then a metadata answer lists a broker."""

import socket
import time
from collections.abc import Mapping

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from relax_events.broker.embedded.ports import HOST
from relax_events.broker.embedded.process import ended_within

_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 0.5
_METADATA_SECONDS = 2.0


def becomes_ready(process: psutil.Process, port: int, *, deadline_seconds: float, client: Mapping[str, str]) -> bool:
    """Wait for a broker and tell whether it got ready; False when its process ended or the deadline passed.

    A listening socket that isn't there yet tells nobody when it comes, so this asks again after each short wait for the end of the process.

    Args:
        process: The broker's.
        port: Where it will listen, on the loopback interface.
        deadline_seconds: On the monotonic clock.
        client: Settings that the broker asks of its clients, for security.
    """
    while not _accepts(port):
        if time.monotonic() > deadline_seconds or ended_within(process, _PAUSE_SECONDS):
            return False
    quick: dict[str, str | int] = {"bootstrap.servers": f"{HOST}:{port}", "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 50, "log_level": 0}
    asking = AdminClient({**quick, **client})
    while not _lists_a_broker(asking):
        if time.monotonic() > deadline_seconds or ended_within(process, _PAUSE_SECONDS):
            return False
    return True


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(_CONNECT_SECONDS)
        return probe.connect_ex((HOST, port)) == 0


def _lists_a_broker(client: AdminClient) -> bool:
    try:
        return bool(client.list_topics(timeout=_METADATA_SECONDS).brokers)
    except KafkaException:
        return False
