"""How many rollout workers fit into the share group: each of a worker's lanes is one of its
members, and the brokers limit its size.
"""

from __future__ import annotations

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError, ConfigError
from relax_events.kafka.admin import Admin

log = structlog.get_logger()
SHARE_GROUP_SIZE_KEY = "group.share.max.size"
REMEDY = (
    f"lower engine.max_prompt_groups, run fewer rollout workers, or raise "
    f"{SHARE_GROUP_SIZE_KEY} on the brokers (Kafka's maximum is 1000)"
)


def has_share_group(config: RunConfig) -> bool:
    """Return whether the run's rollout workers share the prompt queue by a share group."""
    return config.broker.prompt_queue == "share_group" and "rollout" in config.roles()


def read_share_group_size(config: RunConfig, admin: Admin) -> int | None:
    """Return how many members the brokers allow a share group; None where the run has none, or the
    brokers do not report it.
    """
    if not has_share_group(config):
        return None
    try:
        size = admin.broker_settings().get(SHARE_GROUP_SIZE_KEY)
    except BrokerError as error:
        log.info("share_group_size.read_failed", error=str(error))
        return None
    return int(size) if size else None


def max_rollout_workers(config: RunConfig, size: int) -> int:
    """Return how many rollout workers fit into a share group of this size."""
    return size // config.num_lanes


def require_rollout_capacity(config: RunConfig, size: int | None) -> str:
    """Return the capacity for rollout workers as text.

    Args:
        config: The run.
        size: As `read_share_group_size` returns it.
    Raises:
        ConfigError: The initial rollout workers do not fit.
    """
    if not has_share_group(config):
        return "no share group"
    if size is None:
        return f"the brokers do not report {SHARE_GROUP_SIZE_KEY}"
    num_workers = config.roles()["rollout"]
    num_members = num_workers * config.num_lanes
    if num_members > size:
        raise ConfigError(
            f"{num_workers} rollout workers x {config.num_lanes} lanes = {num_members} members "
            f"are more than the brokers allow a share group: {SHARE_GROUP_SIZE_KEY} = {size}; "
            f"{REMEDY}"
        )
    return (
        f"room for {max_rollout_workers(config, size)} rollout workers of {config.num_lanes} lanes "
        f"({SHARE_GROUP_SIZE_KEY} = {size})"
    )
