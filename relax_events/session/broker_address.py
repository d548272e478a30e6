"""The address of the run's broker: an embedded broker's, or a cluster's."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_events.config import BrokerConfig, RunConfig
from relax_events.config.addresses import EMBEDDED
from relax_events.errors import BrokerUnavailable, ConfigError
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.session.principals import apply_principal
from relax_events.topics import TopicPlan
from relax_events.topics.names import SCHEMAS

OPERATOR = "operator"
ANSWER_SECONDS = 5.0
"""Time limit of commands until they report that no broker answers."""


def embedded_broker(config: RunConfig) -> EmbeddedBroker | None:
    """Return the run's embedded broker, or None when it uses a cluster; workers get its address in
    place of `embedded`.
    """
    broker = EmbeddedBroker(
        config.run.directory / "broker",
        credentials=config.broker.credentials,
    )
    is_meant = config.broker.bootstrap_servers == EMBEDDED or (
        broker.state is not None and broker.bootstrap_servers == config.broker.bootstrap_servers
    )
    return broker if is_meant else None


def with_broker_address(config: RunConfig, broker: EmbeddedBroker) -> RunConfig:
    """Return the configuration with the address and the password file of an embedded broker."""
    return config.model_copy(
        update={
            "broker": with_address(config.broker, broker.bootstrap_servers, broker.password_file)
        }
    )


def with_address(
    config: BrokerConfig, bootstrap_servers: str, password_file: Path | None
) -> BrokerConfig:
    """Return a broker table with the address and the password file of an embedded broker."""
    return config.model_copy(
        update={"bootstrap_servers": bootstrap_servers, "embedded_password_file": password_file}
    )


@contextmanager
def attach(
    config: RunConfig, *, by: str, principal: str = OPERATOR, brings_up: bool = True
) -> Iterator[RunConfig]:
    """Yield the configuration of a process that connects to the broker: with its address and its
    principal.

    Args:
        config: The run.
        by: The command, for the list of the embedded broker's users.
        principal: The process's identity at a secured broker.
        brings_up: Start a stopped embedded broker; the last user that leaves stops it again.
    Raises:
        BrokerUnavailable: The embedded broker is stopped and is not to be started, or there never
            was one.
        ConfigError: `broker.credentials` has no password for the principal.
    """
    with locate_broker(config, by=by, brings_up=brings_up) as located_config:
        yield apply_principal(located_config, principal)


@contextmanager
def locate_broker(config: RunConfig, *, by: str, brings_up: bool = True) -> Iterator[RunConfig]:
    """Yield the configuration with the address of the embedded broker, which runs during the block;
    a cluster's is unchanged.

    Raises:
        BrokerUnavailable: The embedded broker is stopped and is not to be started, or there never
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
        raise BrokerUnavailable(
            f"no broker was ever started in {where}, so there is no run; start a run, or the "
            f"broker with: relax broker start --directory {where}"
        )
    with keep_running(broker, by=by) if brings_up else broker.hold():
        yield with_broker_address(config, broker)


@contextmanager
def keep_running(broker: EmbeddedBroker, *, by: str) -> Iterator[None]:
    """Keep an embedded broker running for a command, which reports on stderr that it starts one:
    that takes seconds.
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
    if TopicPlan.from_config(config).topic(SCHEMAS) not in topics:
        raise ConfigError(
            f"the broker has no topics of a run {config.run.id!r}; see run.id and "
            "broker.bootstrap_servers"
        )


def open_admin(config: RunConfig, *, name: str, timeout_seconds: float = ANSWER_SECONDS) -> Admin:
    """Return an admin client of a broker that has answered.

    Args:
        config: The run, with the broker's address filled in.
        name: Distinguishes clients in the broker's log.
        timeout_seconds: Time limit of the answer; `broker.request_timeout_seconds` where that is
            less.
    Raises:
        BrokerUnavailable: No broker answered in time; the text names the address and the remedy.
        BrokerRefused: A broker answered and refused the client; the text gives the reason.
    """
    admin = Admin(Connection.from_config(config.broker, client_id=f"{config.run.id}.{name}"))
    admin.ping(timeout_seconds=min(timeout_seconds, config.broker.request_timeout_seconds))
    return admin
