"""Sends the events of one `relax run`: commands, and final heartbeats of workers that sent none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import Event, RunCommanded, WorkerHeartbeat
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.session.change_audit import build_change
from relax_events.topics import TopicPlan
from relax_events.topics.names import AUDIT, HEARTBEATS

log = structlog.get_logger()
MAX_REASON = 2_000
"""Maximum characters of the reason of a run's end; the worker's log has the rest."""


class SessionEvents:
    """Sends events without waiting, unless a method says otherwise: the calling thread also
    supervises the broker.
    """

    def __init__(self, producer: RecordProducer, topics: TopicPlan, codec: EventCodec) -> None:
        self._producer, self._topics, self._codec = producer, topics, codec

    @classmethod
    def open(cls, config: RunConfig, codec: EventCodec) -> SessionEvents:
        """Open a producer of the run's broker."""
        connection = Connection.from_config(config.broker, client_id=f"{config.run.id}.run")
        return cls(RecordProducer(connection), TopicPlan.from_config(config), codec)

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()

    def send_command(self, command: RunCommanded) -> None:
        """Send a command of the run."""
        self._send("control.commands", command)

    def write_command(self, command: RunCommanded) -> None:
        """Send a command and wait until the broker has it.

        Raises:
            BrokerError: The broker did not take it.
        """
        self.send_command(command)
        self._producer.flush()

    def send_change(self, command: str, arguments: dict[str, Any], answer: str) -> None:
        """Record that this account changed the run by a command."""
        self._send(AUDIT, build_change(command, arguments, answer=answer))

    def write_abort(self, reason: str) -> None:
        """Write the command that ends the run, and wait; a failure is logged."""
        try:
            self.write_command(RunCommanded(command=Command.STOP, reason=reason[:MAX_REASON]))
        except BrokerError as error:
            log.warning("run_end.write_failed", error=str(error))

    def send_goodbye(self, heartbeat: WorkerHeartbeat) -> None:
        """Send a worker's STOPPED heartbeat in its name, from its newest heartbeat."""
        goodbye = replace(
            heartbeat,
            state=WorkerState.STOPPED,
            num_in_flight=0,
            busy_since=None,
            sent_at=now_micros(),
        )
        self._send(HEARTBEATS[heartbeat.role], goodbye, key=heartbeat.worker_id)

    def send_goodbyes(self, heartbeats: Iterable[WorkerHeartbeat]) -> None:
        """Send STOPPED for several workers; a failure is logged."""
        try:
            for heartbeat in heartbeats:
                self.send_goodbye(heartbeat)
        except (
            BrokerError
        ) as error:  # they count as alive until `workers.heartbeat_timeout_seconds` have passed
            log.warning("final_heartbeat.send_failed", error=str(error))

    def _send(self, entity: str, event: Event, *, key: str = "") -> None:
        value = self._codec.encode(event)
        self._producer.send(ProducerRecord(self._topics.topic(entity), value, key=key))
