"""The parent run of a replay or a fork, as its log describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from relax_events.config import RunConfig
from relax_events.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    CorruptRecord,
    SchemaError,
)
from relax_events.events.codec import EventCodec
from relax_events.events.types import Event, TrainStepCommitted
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.runtime.run_description import read_described_config, read_description
from relax_events.topics import TopicPlan

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ParentRun:
    """A run as its log describes it."""

    config: RunConfig
    plan: TopicPlan
    connection: Connection
    given_uri: str = ""

    @property
    def objects_uri(self) -> str:
        """URI of its object store: given by the run that starts from it, else read from the
        log.
        """
        return self.given_uri or self.config.objects_uri

    @classmethod
    def read(
        cls, connection: Connection, run_id: str, *, own: RunConfig | None = None
    ) -> ParentRun:
        """Read a run's description.

        Args:
            connection: To the cluster.
            run_id: The run.
            own: Configuration of the run that starts from it, if it has a run file; see
                `read_described_config`.

        Raises:
            ConfigError: There is no such run, or its log holds no description of it.
        """
        reader = LogReader(connection)
        try:
            described = read_description(reader, run_id)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            raise ConfigError(
                f"parent.run = {run_id!r} is not a run on {connection.bootstrap_servers}: "
                f"{error}; see relax runs list"
            ) from error
        finally:
            reader.close()
        if described is None:
            remedy = "start it again with this release: relax run RUN_FILE"
            raise ConfigError(
                f"the log of run {run_id!r} holds no description of the run, like logs of earlier "
                f"releases; {remedy}"
            )
        config = read_described_config(described, run_id=run_id, own=own)
        return cls(
            config, TopicPlan.from_config(config), connection, own.parent.objects_uri if own else ""
        )

    def codec(self) -> EventCodec:
        """Return a codec with the schemas of the run's writers."""
        codec = EventCodec()
        for record in self._records("control.schemas"):
            if record.value:
                try:
                    codec.learn(record.value, key=record.key)
                except SchemaError as error:
                    log.warning("record.decode_failed", place=record.location, error=str(error))
        return codec

    def events(self, entity: str) -> Iterator[Event]:
        """Yield the committed events of a control topic up to its current end."""
        codec = self.codec()
        for record in self._records(entity):
            try:
                yield codec.decode(record.value)
            except (CorruptRecord, SchemaError) as error:
                log.warning("record.decode_failed", place=record.location, error=str(error))

    def steps(self) -> Iterator[TrainStepCommitted]:
        """Yield the train steps that the run has committed so far."""
        return (
            event
            for event in self.events("control.train-steps")
            if isinstance(event, TrainStepCommitted)
        )

    def _records(self, entity: str) -> Iterator[Record]:
        reader, place = LogReader(self.connection), (self.plan.topic(entity), 0)
        try:
            yield from reader.stream({place: reader.watermarks(*place)})
        finally:
            reader.close()
