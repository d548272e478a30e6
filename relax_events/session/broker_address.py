"""Where the run's broker is."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_events.config import BrokerConfig, RunConfig
from relax_events.errors import BrokerUnavailable, ConfigError
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.credentials import apply_principal
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.topics import TopicPlan

OPERATOR = "operator"
EMBEDDED = "embedded"
"""`broker.bootstrap_servers` of a run that brings its broker along."""
ANSWER_SECONDS = 5.0
"""How long a person at the command line waits to learn that no broker is there."""


def embedded_broker(config: RunConfig) -> EmbeddedBroker | None:
    """Return the broker that the run brings along, or None when it uses a cluster; workers are
    given its address in place of its name.
    """
    broker = EmbeddedBroker(
        config.run.directory / "broker",
        credentials=config.broker.credentials,
        heap_mib=config.broker.heap_mib,
    )
    is_meant = config.broker.bootstrap_servers == EMBEDDED or (
        broker.state is not None and broker.bootstrap_servers == config.broker.bootstrap_servers
    )
    return broker if is_meant else None


def with_broker_address(config: RunConfig, broker: EmbeddedBroker) -> RunConfig:
    """Return the configuration with the address of an embedded broker filled in, and with where its
    password lies.
    """
    return config.model_copy(
        update={
            "broker": with_address(config.broker, broker.bootstrap_servers, broker.password_file)
        }
    )


def with_address(
    config: BrokerConfig, bootstrap_servers: str, password_file: Path | None
) -> BrokerConfig:
    """Return a broker table with the address of an embedded broker filled in, and with where its
    password lies.
    """
    return config.model_copy(
        update={"bootstrap_servers": bootstrap_servers, "embedded_password_file": password_file}
    )


@contextmanager
def attach(
    config: RunConfig, *, by: str, principal: str = OPERATOR, brings_up: bool = True
) -> Iterator[RunConfig]:
    """Give the configuration of a process that reaches the broker: with its address, and with who
    it is there.

    Args:
        config: The run.
        by: The command, for the record of who uses the embedded broker.
        principal: Who the process is to a secured broker.
        brings_up: Start an embedded broker that is down; the last user that leaves stops it again.
    Raises:
        BrokerUnavailable: The embedded broker is down and is not to be brought up, or there never
            was one.
        ConfigError: `broker.credentials` has no password for the principal.
    """
    with locate_broker(config, by=by, brings_up=brings_up) as found:
        yield apply_principal(found, principal)


@contextmanager
def locate_broker(config: RunConfig, *, by: str, brings_up: bool = True) -> Iterator[RunConfig]:
    """Give the configuration with the address of the embedded broker, which is up while the block
    runs; a cluster's stays as it is.

    Raises:
        BrokerUnavailable: The embedded broker is down and is not to be brought up, or there never
            was one.
    """
    broker = embedded_broker(config)
    if broker is None:
        yield config
        return
    where = config.run.directory / "broker"
    if not brings_up and config.broker.bootstrap_servers == EMBEDDED and not broker.is_running:
        raise BrokerUnavailable(
            f"the embedded broker in {where} does not run; start it with: relax broker start "
            f"--directory {where}"
        )
    if broker.state is None:
        rule = f"no broker was ever started in {where}, so no run is there"
        raise BrokerUnavailable(
            f"{rule}; start a run, or the broker with: relax broker start --directory {where}"
        )
    with keep_running(broker, by=by) if brings_up else broker.hold():
        yield with_broker_address(config, broker)


@contextmanager
def keep_running(broker: EmbeddedBroker, *, by: str) -> Iterator[None]:
    """Keep an embedded broker up for a command, which says on stderr that it starts one: that takes
    seconds.
    """
    if not broker.is_running:
        print(
            f"the embedded broker in {broker.directory} is down; starting it for {by}",
            file=sys.stderr,
            flush=True,
        )
    with broker.in_use(by):
        yield


def require_run(config: RunConfig, topics: Container[str]) -> None:
    """Refuse a run that the broker does not know.

    Args:
        config: The run.
        topics: Names of the broker's topics, at least of this run's.
    Raises:
        ConfigError: The run's schemas have no topic there.
    """
    if TopicPlan.from_config(config).topic("control.schemas") not in topics:
        raise ConfigError(
            f"the broker has no topics of a run {config.run.id!r}; see run.id and "
            "broker.bootstrap_servers"
        )


def open_admin(config: RunConfig, *, name: str, timeout_seconds: float = ANSWER_SECONDS) -> Admin:
    """Return an admin client of a broker that has answered.

    Args:
        config: The run, with the broker's address filled in.
        name: Tells our clients apart in the broker's log.
        timeout_seconds: How long to wait for an answer; `broker.request_timeout_seconds` where that
            is less.
    Raises:
        BrokerUnavailable: None answered in time; the text names the address and the remedy.
        BrokerRefused: One is there and does not let us in; the text says why.
    """
    admin = Admin(Connection.from_config(config.broker, client_id=f"{config.run.id}.{name}"))
    admin.ping(timeout_seconds=min(timeout_seconds, config.broker.request_timeout_seconds))
    return admin
