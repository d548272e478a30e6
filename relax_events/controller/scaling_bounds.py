"""The limits of scaling: which roles are elastic, and how many workers each may have. Each lane of
a rollout worker is a member of the share group, and the brokers limit its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.kafka.leases import SHARE_GROUP_SIZE_KEY
from relax_events.projections.scale_requests import DEFAULT_MODEL, MICROS
from relax_events.projections.scaling import ScaleState
from relax_events.topics import TopicPlan

REMEDY = (
    f"lower engine.max_prompt_groups, run fewer rollout workers, or raise "
    f"{SHARE_GROUP_SIZE_KEY} on the brokers (Kafka's maximum is 1000)"
)
ELASTIC_ROLES = ("rollout", "reward", "judge", "reference", "actor-forward", "teacher")
"""Roles that take work from a queue or from partitions, which their workers share."""
CONFIRM_SECONDS = 30.0
"""How long after its deadline a worker's exit may be reported."""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a model by the run file.

    Attributes:
        model: Name of the model in the API.
        role: The role that serves it.
        num_at_start: Initial number of workers; they are never removed.
        max_workers: Upper bound, for the reason `limit`.
        limit: The origin of the bound, with the remedy.
        timeout: Microseconds that added workers may take until they serve, by default.
        least_timeout: Microseconds that their server may take by its own limit to start and load;
            the minimum of a request's timeout.
        urls: Servers that the initial workers are attached to, one worker each.
    """

    model: str
    role: str
    num_at_start: int
    max_workers: int
    limit: str
    timeout: int
    least_timeout: int = 0
    urls: tuple[str, ...] = ()

    def num_desired(self, state: ScaleState) -> int:
        """Return the desired number of workers, the initial ones included."""
        return self.num_at_start + len(state.remaining_workers(self.role))


@dataclass(frozen=True, slots=True)
class ScalingBounds:
    """A run's limits; times in microseconds."""

    pools: Mapping[str, WorkerPool]
    drain: int
    confirm: int
    keeps_partial: bool
    first_version: int
    is_supervised: bool
    """Whether a `relax run` starts the workers."""
    has_external_autoscaler: bool = False
    """Whether an autoscaler sets StatefulSets' replicas to the desired numbers. Their pods have the
    indices from 0 on."""

    @classmethod
    def from_config(
        cls, config: RunConfig, *, is_supervised: bool, share_group_size: int | None = None
    ) -> ScalingBounds:
        """Read the limits from a run file and, where it is known, from the brokers' limit of a
        share group's size.
        """
        roles = config.roles()
        pools = [
            _build_pool(config, role, num_at_start=roles[role], share_group_size=share_group_size)
            for role in ELASTIC_ROLES
            if role in roles
        ]
        scaling = config.scaling
        return cls(
            pools={pool.model: pool for pool in pools},
            drain=int(config.workers.drain_seconds * MICROS),
            confirm=int(CONFIRM_SECONDS * MICROS),
            keeps_partial=scaling.on_partial_failure == "keep",
            first_version=config.first_version,
            is_supervised=is_supervised,
            has_external_autoscaler=config.scaling.external_autoscaler and not is_supervised,
        )


def _build_pool(
    config: RunConfig, role: str, *, num_at_start: int, share_group_size: int | None
) -> WorkerPool:
    """Build a role's pool. Members of a consumer group beyond its partitions would get no work, and
    a share group refuses members beyond its size.
    """
    most = config.scaling.max_workers
    limits = [(most, f"scaling.max_workers = {most}")]
    if role != "rollout":
        partitions = TopicPlan.from_config(config).num_sample_partitions
        text = f"each needs a partition, and there are {partitions} (broker.partitions_per_version)"
        limits.append((partitions, text))
    elif config.broker.prompt_queue == "consumer_group":
        partitions = config.broker.queue_partitions
        text = f"each needs a partition, and broker.queue_partitions = {partitions}"
        limits.append((partitions, text))
    elif share_group_size is not None:
        lanes = config.plan_lanes(share_group_size)
        text = (
            f"each starts with {lanes.first} lanes and may have {lanes.most}, and "
            f"{SHARE_GROUP_SIZE_KEY} = {share_group_size} on the brokers; {REMEDY}"
        )
        limits.append((lanes.workers, text))
    most, limit = min(limits, key=itemgetter(0))
    engine = {"rollout": config.engine, "judge": config.judge.engine}.get(role)
    urls = engine.sglang.urls if engine is not None and engine.name == "sglang" else ()
    least_seconds = engine.start_limit_seconds if engine is not None else 0.0
    return WorkerPool(
        model=DEFAULT_MODEL if role == "rollout" else role,
        role=role,
        num_at_start=num_at_start,
        max_workers=max(most, num_at_start),
        limit=limit,
        timeout=int(max(config.health.start_seconds, least_seconds) * MICROS),
        least_timeout=int(least_seconds * MICROS),
        urls=urls,
    )


def _has_share_group(config: RunConfig) -> bool:
    """Return whether the run's rollout workers share the prompt queue by a share group."""
    return config.broker.prompt_queue == "share_group" and "rollout" in config.roles()


def require_rollout_capacity(config: RunConfig, size: int | None) -> str:
    """Return the capacity for rollout workers as text.

    Args:
        config: The run.
        size: Members that the brokers allow a share group; None if unknown.
    Raises:
        ConfigError: The initial rollout workers do not fit.
    """
    if not _has_share_group(config):
        return "no share group"
    if size is None:
        return f"the brokers do not report {SHARE_GROUP_SIZE_KEY}"
    num_workers, lanes = config.roles()["rollout"], config.plan_lanes(size)
    num_members = num_workers * lanes.first
    if num_members > size:
        raise ConfigError(
            f"{num_workers} rollout workers x {lanes.first} lanes at their start = {num_members} "
            f"members are more than the brokers allow a share group: {SHARE_GROUP_SIZE_KEY} = "
            f"{size}; {REMEDY}"
        )
    return (
        f"room for {lanes.workers} rollout workers of {lanes.first} to {lanes.most} lanes "
        f"({SHARE_GROUP_SIZE_KEY} = {size})"
    )
