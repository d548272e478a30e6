"""Selects the broker of a command that reads many runs: a run file's, a cluster by address, or the
embedded one of a directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from relax_events.config import BrokerConfig, RunConfig, load_run_config
from relax_events.config.addresses import EMBEDDED
from relax_events.errors import BrokerUnavailable, ConfigError
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.session.broker_address import (
    ANSWER_SECONDS,
    OPERATOR,
    keep_running,
    with_address,
)
from relax_events.session.principals import apply_principal


@dataclass(frozen=True, slots=True)
class Cluster:
    """A broker table and its directory of runs; `run_file` is the run file that named them, if one
    did.
    """

    broker: BrokerConfig
    directory: Path
    run_file: RunConfig | None = None

    @classmethod
    def from_options(
        cls, *, config: Path | None, bootstrap_servers: str, directory: Path
    ) -> Cluster:
        """Return the broker that a command's options name.

        Raises:
            ConfigError: They name two.
        """
        if config is not None and bootstrap_servers:
            raise ConfigError(
                f"--config {config} and --bootstrap-servers {bootstrap_servers} name a "
                "broker each; give one of them"
            )
        if config is not None:
            return cls.from_run_file(load_run_config(config))
        return cls(BrokerConfig(bootstrap_servers=bootstrap_servers or EMBEDDED), directory)

    @classmethod
    def from_run_file(cls, run_file: RunConfig) -> Cluster:
        """Return the broker of a run, for its operator."""
        return cls(apply_principal(run_file, OPERATOR).broker, run_file.run.directory, run_file)

    @property
    def _embedded(self) -> EmbeddedBroker | None:
        return (
            EmbeddedBroker(self.directory / "broker")
            if self.broker.bootstrap_servers == EMBEDDED
            else None
        )

    @property
    def broker_with_address(self) -> BrokerConfig:
        """The broker table, with the address and the password file of an embedded broker.

        Raises:
            BrokerUnavailable: The embedded broker was never started.
        """
        embedded = self._embedded
        return (
            self.broker
            if embedded is None
            else with_address(self.broker, embedded.bootstrap_servers, embedded.password_file)
        )

    def connection(self, *, name: str) -> Connection:
        """Return a connection to a broker that has answered; `running` keeps the embedded one up.

        Raises:
            BrokerUnavailable: It does not run or does not answer; the text says where and what to
                do.
        """
        broker = self.broker_with_address
        run_id = (
            self.run_file.run.id if self.run_file else "relax"
        )  # of a secured run, whose rights end with its prefix
        connection = Connection.from_config(broker, client_id=f"{run_id}.{name}")
        Admin(connection).ping(timeout_seconds=min(ANSWER_SECONDS, broker.request_timeout_seconds))
        return connection

    @contextmanager
    def running(self, *, by: str) -> Iterator[None]:
        """Keep the embedded broker running during the block; nothing happens for a cluster.

        Args:
            by: The command that needs it, for the record.
        Raises:
            BrokerUnavailable: The directory has no broker; the text says what else can be given.
        """
        if (embedded := self._embedded) is None:
            yield
            return
        if embedded.state is None:
            rule = f"no broker was ever started in {embedded.directory}, so there is no run to read"
            raise BrokerUnavailable(f"{rule}; give --directory, --bootstrap-servers or a run file")
        with keep_running(embedded, by=by):
            yield
