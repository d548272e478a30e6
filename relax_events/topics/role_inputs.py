"""The input topics of each role's consumer group, on which lag, offset resets and purges are
based.
"""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.topics.partitions import TopicPartition
from relax_events.topics.plan import LOGPROB_TOPICS, TRAINER_INPUTS, TopicPlan

TOPIC_BY_ROLE = {
    "actor-forward" if name == "actor" else name: topic for name, topic in LOGPROB_TOPICS.items()
}


def list_role_inputs(config: RunConfig) -> dict[str, list[str]]:
    """Return the topics that each role of this run reads by committed offsets, without the run's
    prefix.

    Rollout workers appear only when they divide the queue by a consumer group; a share group keeps
    its state on the broker. A replay has no such role: its trainer reads the records that its
    parent's steps name.
    """
    if config.is_replay:
        return {}
    roles = config.roles()
    samples = {
        role: ["rollout.samples"] for role in ("reward", "judge", *TOPIC_BY_ROLE) if role in roles
    }
    evaluated = [entity for role, entity in TOPIC_BY_ROLE.items() if role in roles]
    scores = ["reward.scores"] if config.algorithm.has_rewards else []
    inputs = samples | {
        "advantage": ["rollout.samples", *scores, *evaluated],
        "trainer": [*TRAINER_INPUTS],
    }
    if config.broker.prompt_queue == "consumer_group":
        inputs["rollout"] = ["prompt.groups"]
    return {role: entities for role, entities in inputs.items() if role in roles}


def list_input_partitions(config: RunConfig, role: str) -> list[TopicPartition]:
    """Return every partition that a role reads by committed offsets."""
    plan = TopicPlan.from_config(config)
    return [
        (plan.topic(entity), partition)
        for entity in list_role_inputs(config)[role]
        for partition in range(
            plan.queue_partitions if entity == "prompt.groups" else plan.num_sample_partitions
        )
    ]
