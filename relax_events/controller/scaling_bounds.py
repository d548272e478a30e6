"""The limits of scaling: which roles are elastic, and how many workers each may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.controller.rollout_capacity import (
    REMEDY,
    SHARE_GROUP_SIZE_KEY,
    max_rollout_workers,
)
from relax_events.projections.scale_requests import MICROS
from relax_events.topics import TopicPlan

DEFAULT_MODEL = "default"
"""The policy's engines: the rollout workers."""
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
    plan, most = TopicPlan.from_config(config), config.scaling.max_workers
    limit = f"scaling.max_workers = {most}"
    if role != "rollout" and plan.num_sample_partitions < most:
        most, limit = (
            plan.num_sample_partitions,
            (
                f"each needs a partition, and there are {plan.num_sample_partitions} "
                "(broker.partitions_per_version)"
            ),
        )
    elif (
        role == "rollout"
        and config.broker.prompt_queue == "consumer_group"
        and config.broker.queue_partitions < most
    ):
        most, limit = (
            config.broker.queue_partitions,
            (
                "each needs a partition, and broker.queue_partitions = "
                f"{config.broker.queue_partitions}"
            ),
        )
    elif (
        role == "rollout"
        and share_group_size is not None
        and max_rollout_workers(config, share_group_size) < most
    ):
        most = max_rollout_workers(config, share_group_size)
        limit = (
            f"each has {config.num_lanes} lanes, and {SHARE_GROUP_SIZE_KEY} = "
            f"{share_group_size} on the brokers; "
            f"{REMEDY}"
        )
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
