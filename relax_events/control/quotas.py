"""Which quotas hold a run to its share of a cluster."""

from __future__ import annotations

from relax_events.broker.connection import Connection
from relax_events.broker.quotas import QuotaEntity
from relax_events.config import RunConfig
from relax_events.control.security import admin_connection
from relax_events.topics.rights import PRINCIPALS, username_of


def quota_entities(config: RunConfig) -> list[QuotaEntity]:
    """Return whom a run's quotas bind: its users, or on an open cluster its workers by client id.

    Client ids are what clients say of themselves, so on an open cluster a quota is an agreement, not a fence.
    """
    if config.broker.credentials is not None:
        return [QuotaEntity("user", username_of(config.run.id, role)) for role in PRINCIPALS]
    workers = {**config.roles(), "trainer": config.trainer.ranks}
    return [QuotaEntity("client-id", f"{config.run.id}.{role}-{index}") for role, count in workers.items() for index in range(count)]


def quota_connection(config: RunConfig) -> Connection:
    """Return the connection that may set quotas: of the super user where there is one."""
    if config.broker.credentials is not None:
        return admin_connection(config)
    return Connection.of(config.broker, client_id=f"{config.run.id}.quotas")
