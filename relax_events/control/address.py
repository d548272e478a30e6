"""Where the run's broker is."""

from __future__ import annotations

from relax_events.broker.admin import Admin
from relax_events.broker.connection import Connection
from relax_events.broker.credentials import as_principal
from relax_events.broker.embedded import EmbeddedBroker
from relax_events.config import RunConfig
from relax_events.errors import BrokerUnavailable

OPERATOR = "operator"
ANSWER_SECONDS = 5.0
"""How long a person at the command line waits to learn that no broker is there."""


def embedded_broker(config: RunConfig) -> EmbeddedBroker | None:
    """Return the broker that the run brings along, or None when it uses a cluster."""
    if config.broker.bootstrap_servers != "embedded":
        return None
    return EmbeddedBroker(config.run.directory / "broker", credentials=config.broker.credentials)


def with_bootstrap_servers(config: RunConfig, bootstrap_servers: str) -> RunConfig:
    """Return the configuration with the broker's address filled in."""
    return config.model_copy(update={"broker": config.broker.model_copy(update={"bootstrap_servers": bootstrap_servers})})


def attach(config: RunConfig, *, principal: str = OPERATOR) -> RunConfig:
    """Return the configuration of a process that reaches the broker: with its address, and with who it is there.

    Raises:
        BrokerUnavailable: The embedded broker does not run.
        ConfigError: `broker.credentials` has no password for the principal.
    """
    return as_principal(locate(config), principal)


def locate(config: RunConfig) -> RunConfig:
    """Return the configuration with the address of the embedded broker; a cluster's stays as it is.

    Raises:
        BrokerUnavailable: The embedded broker does not run.
    """
    broker = embedded_broker(config)
    if broker is None:
        return config
    if not broker.is_running:
        where = config.run.directory / "broker"
        raise BrokerUnavailable(f"the embedded broker in {where} does not run; start it with: relax broker start --directory {where}")
    return with_bootstrap_servers(config, broker.bootstrap_servers)


def open_admin(config: RunConfig, *, name: str, timeout_seconds: float = ANSWER_SECONDS) -> Admin:
    """Return an admin client of a broker that has answered.

    Args:
        config: The run, with the broker's address filled in.
        name: Tells our clients apart in the broker's log.
        timeout_seconds: How long to wait for an answer; `broker.request_timeout_seconds` where that is less.
    Raises:
        BrokerUnavailable: None answered in time; the text names the address and the remedy.
        BrokerRefused: One is there and does not let us in; the text says why.
    """
    admin = Admin(Connection.of(config.broker, client_id=f"{config.run.id}.{name}"))
    admin.ping(timeout_seconds=min(timeout_seconds, config.broker.request_timeout_seconds))
    return admin
