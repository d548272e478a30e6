"""What each role's consumer group reads: the ground on which lag, resets and purges stand."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.topics import TopicPlan
from relax_events.topics.plan import EVALUATOR_TOPICS, TRAINER_INPUTS

Place = tuple[str, int]
TOPIC_OF_ROLE = {
    "actor-forward" if name == "actor" else name: topic for name, topic in EVALUATOR_TOPICS.items()
}


def role_inputs(config: RunConfig) -> dict[str, list[str]]:
    """Return the entities that each role of this run reads by committed offsets.

    Rollout workers appear where they divide the queue by a consumer group; a share group keeps its
    own books on the broker. A replay
    has no such role: its trainer reads what its source's steps name.
    """
    if config.is_replay:
        return {}
    roles = config.roles()
    samples = {
        role: ["rollout.samples"] for role in ("reward", "judge", *TOPIC_OF_ROLE) if role in roles
    }
    evaluated = [entity for role, entity in TOPIC_OF_ROLE.items() if role in roles]
    scores = ["reward.scores"] if config.algorithm.has_rewards else []
    inputs = samples | {
        "advantage": ["rollout.samples", *scores, *evaluated],
        "trainer": [*TRAINER_INPUTS],
    }
    if config.broker.lease == "consumer_group":
        inputs["rollout"] = ["prompt.groups"]
    return {role: entities for role, entities in inputs.items() if role in roles}


def input_places(config: RunConfig, role: str) -> list[Place]:
    """Return every (topic, partition) that a role reads by committed offsets."""
    plan = TopicPlan.of(config)
    return [
        (plan.topic(entity), partition)
        for entity in role_inputs(config)[role]
        for partition in range(
            plan.queue_partitions if entity == "prompt.groups" else plan.num_sample_partitions
        )
    ]
