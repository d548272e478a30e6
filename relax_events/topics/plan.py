"""Declares every topic of a run, with its partitions, its settings and the types of its events.

The broker's ACLs decide who may write a topic. So an event is accepted only on the topic whose
writers may produce it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from relax_events.config.run_config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.parts import Outcome
from relax_events.events.types import (
    BroadcastMembership,
    ChangeRequested,
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    PrompterStateSaved,
    PromptGroupEnded,
    PromptGroupIssued,
    RunCommanded,
    RunDescribed,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
    WorkerHeartbeat,
)
from relax_events.topics.names import (
    ADVANTAGE_ROLE,
    AUDIT,
    BROADCAST,
    COMMANDS,
    COMPACTED_TOPICS,
    CONTROL_TOPICS,
    DEAD_LETTER_ROLES,
    DEAD_LETTERS,
    END_REQUESTS,
    EVALUATIONS,
    GROUP_OUTCOMES,
    HEARTBEATS,
    LOGPROB_TOPICS,
    METRICS,
    METRICS_TOPICS,
    PER_ROLE_TOPICS,
    POLICY_VERSIONS,
    PROMPT_GROUPS,
    PROMPTER_STATE,
    QUEUE_TOPICS,
    REWARD_SCORES,
    ROLES,
    ROLLOUT_SAMPLES,
    SAMPLE_TOPICS,
    SUMMARY_TOPICS,
    TOPIC_BY_ROLE,
    TRAIN_STEPS,
    TRAINER_INPUTS,
    TRAINING_SAMPLES,
)
from relax_events.topics.partitions import (
    TopicPartition,
    compute_partition,
    compute_slot,
    count_slots,
    list_slot_partitions,
)

SEGMENT_SECONDS = 300.0
"""Age at which the broker closes a log segment, where `run.retain_versions` purges: it deletes only
closed segments from disk."""
_DAY_MS = 86_400_000
METRICS_RETENTION = {
    "retention.ms": str(7 * _DAY_MS),
    "retention.bytes": str(256 << 20),
    "segment.bytes": str(16 << 20),
    "segment.ms": str(_DAY_MS),
}
"""Old metrics are not needed to resume a run: the metrics role has stored them in the run's folder
and sent them to the trackers."""
COMPACTION = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}
"""Only closed segments are compacted. Heartbeats arrive every second for weeks, and with the
default segment of 1 GiB every starting worker would read all of them."""
SCORES_PATTERN = re.compile("[a-z0-9][a-z0-9_-]{0,47}")
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""A ready prompt group of 16 samples with 20,000 tokens each has 9 MiB: tokens, mask and six arrays
of floats, 29 bytes a token."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic's required partitions, replication and settings."""

    name: str
    num_partitions: int
    replication_factor: int
    doc: str
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """Names and partitions of a run's topics, and its consumer groups and transactional ids."""

    run_id: str
    max_staleness: int
    partitions_per_version: int
    queue_partitions: int
    replication_factor: int
    compression: str
    source_run_id: str = ""
    """The parent run whose prompts and samples a replay reads; empty for other runs."""
    segment_seconds: float = 0.0
    """The age at which a log segment is closed, so that it can be deleted once its records are
    purged; 0 uses the broker's setting."""
    roles: tuple[str, ...] = ROLES
    """The run's roles, which have topics for heartbeats and metrics."""

    @classmethod
    def from_config(cls, config: RunConfig) -> TopicPlan:
        """Create the plan of a run's configuration."""
        broker = config.broker
        return cls(
            run_id=config.run.id,
            max_staleness=config.run.max_staleness,
            partitions_per_version=broker.partitions_per_version,
            queue_partitions=broker.queue_partitions,
            replication_factor=broker.replication_factor,
            compression=broker.compression,
            source_run_id=config.parent.run if config.is_replay else "",
            segment_seconds=SEGMENT_SECONDS if config.run.retain_versions else 0.0,
            roles=tuple(role for role in ROLES if role in config.roles()),
        )

    @property
    def num_slots(self) -> int:
        """Slots in the policy-version ring."""
        return count_slots(self.max_staleness)

    @property
    def num_sample_partitions(self) -> int:
        """Partitions of every sample topic."""
        return self.num_slots * self.partitions_per_version

    def topic(self, entity: str) -> str:
        """Return the full name of a topic, for example of `rollout.samples`; a replay's sample
        topics are its parent's.
        """
        is_sample_topic = (
            entity in QUEUE_TOPICS or entity in SAMPLE_TOPICS or entity.startswith("reward.scores.")
        )
        return self.build_topic_name(
            self.source_run_id if self.source_run_id and is_sample_topic else self.run_id, entity
        )

    @staticmethod
    def build_topic_name(run_id: str, entity: str) -> str:
        """Return the full name of a topic of a run."""
        return f"relax.{run_id}.{entity}"

    @staticmethod
    @cache
    def parse_entity(topic: str) -> str:
        """Return the part of a full topic name behind the run's prefix, for example
        `rollout.samples`. Run ids contain no dots.
        """
        return topic.split(".", 2)[-1]

    def end_requests(self, role: str) -> str:
        """Return the topic, without the run's prefix, to which a role writes a request to end a
        prompt group.
        """
        return TRAINING_SAMPLES if role == ADVANTAGE_ROLE else END_REQUESTS

    def consumer_group(self, role: str) -> str:
        """Return the role's consumer group (or share group)."""
        return f"relax.{self.run_id}.{role}"

    def transactional_id(self, role: str) -> str:
        """Return the transactional id of a role that has one active instance."""
        return f"relax.{self.run_id}.{role}.0"

    def partition(self, prompt_group_id: str, policy_version: int) -> int:
        """Return the partition of a prompt group's samples."""
        return compute_partition(
            prompt_group_id,
            policy_version,
            num_slots=self.num_slots,
            shards=self.partitions_per_version,
        )

    def partitions_of_version(self, policy_version: int) -> range:
        """Return the partitions of the slot that the version owns."""
        return list_slot_partitions(
            compute_slot(policy_version, num_slots=self.num_slots),
            shards=self.partitions_per_version,
        )

    def sample_topics(self) -> list[str]:
        """Return the full names of the run's own sample topics, which all have the same partitions;
        empty for a replay.
        """
        return [] if self.source_run_id else [self.topic(entity) for entity in SAMPLE_TOPICS]

    def specs(self) -> list[TopicSpec]:
        """Return the specifications of the run's own topics."""
        rest = "could not process, unchanged, with the error in their headers"
        roles = ("trainer",) if self.source_run_id else DEAD_LETTER_ROLES
        dead_letters = {f"{role}{DEAD_LETTERS}": f"records that {role} {rest}" for role in roles}
        return [
            *self._sample_specs(),
            *self._specs(CONTROL_TOPICS, 1),
            *self._specs(self._present(METRICS_TOPICS), 1, METRICS_RETENTION),
            *self._specs(self._present(COMPACTED_TOPICS), 1, COMPACTION),
            *self._specs(
                SUMMARY_TOPICS, 1, COMPACTION | {"segment.bytes": str(2 * MAX_RECORD_BYTES)}
            ),
            *self._specs(dead_letters, 1),
        ]

    def _present(self, entities: Mapping[str, str]) -> dict[str, str]:
        return {entity: doc for entity, doc in entities.items() if self.has(entity)}

    def has(self, entity: str) -> bool:
        """Return whether the run has a topic: heartbeat and metrics topics exist only for the run's
        roles.
        """
        return entity not in PER_ROLE_TOPICS or entity.rpartition(".")[-1] in self.roles

    def scores_entity(self, name: str) -> str:
        """Return the topic, without the run's prefix, of another reward function's scores for old
        samples.

        Raises:
            ConfigError: The name is not valid in a topic name.
        """
        if not SCORES_PATTERN.fullmatch(name):
            raise ConfigError(
                "the name of scores must be 1 to 48 of a-z, 0-9, '-' and '_', with a letter or "
                f"digit first, got {name!r}; set --name"
            )
        return f"reward.scores.{name}"

    def scores_spec(self, name: str) -> TopicSpec:
        """Return the specification of a scores topic, which is created when samples are rescored
        and is not part of `specs`.
        """
        entity = self.scores_entity(name)
        settings = {"compression.type": self.compression.replace("none", "uncompressed")}
        return self._specs(
            {entity: f"SampleScored by another reward function, {name}"},
            self.num_sample_partitions,
            settings,
        )[0]

    def _sample_specs(self) -> list[TopicSpec]:
        if self.source_run_id:
            return []
        settings = {"compression.type": self.compression.replace("none", "uncompressed")}
        return [
            *self._specs(QUEUE_TOPICS, self.queue_partitions),
            *self._specs(SAMPLE_TOPICS, self.num_sample_partitions, settings),
        ]

    def _specs(
        self, entities: dict[str, str], num_partitions: int, settings: dict[str, str] | None = None
    ) -> list[TopicSpec]:
        base = {
            "message.timestamp.type": "LogAppendTime",
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "max.message.bytes": str(MAX_RECORD_BYTES),
            "min.insync.replicas": str(min(2, self.replication_factor)),
        }
        if self.segment_seconds:
            base["segment.ms"] = str(round(self.segment_seconds * 1000))
        every = base | (settings or {})
        return [
            TopicSpec(self.topic(entity), num_partitions, self.replication_factor, doc, every)
            for entity, doc in entities.items()
        ]


EVENTS_ON: dict[str, tuple[type[Event], ...]] = {
    PROMPT_GROUPS: (PromptGroupIssued,),
    ROLLOUT_SAMPLES: (SampleRolledOut,),
    REWARD_SCORES: (SampleScored,),
    **dict.fromkeys(LOGPROB_TOPICS.values(), (SampleEvaluated,)),
    TRAINING_SAMPLES: (SampleReady, PromptGroupEnded),
    END_REQUESTS: (PromptGroupEnded,),
    POLICY_VERSIONS: (PolicyVersionPublished,),
    TRAIN_STEPS: (TrainStepCommitted,),
    GROUP_OUTCOMES: (PromptGroupEnded,),
    COMMANDS: (RunCommanded, RunDescribed),
    AUDIT: (ChangeRequested,),
    EVALUATIONS: (PolicyEvaluated,),
    BROADCAST: (BroadcastMembership,),
    PROMPTER_STATE: (PrompterStateSaved,),
    **dict.fromkeys(HEARTBEATS.values(), (WorkerHeartbeat,)),
    **dict.fromkeys(METRICS.values(), (MetricsReported,)),
}


def allowed_outcomes(entity: str) -> tuple[Outcome, ...]:
    """Return the outcomes that a role may request on a topic of the trainer's input.

    Only the role that writes training samples may request that a prompt group is filtered.
    """
    return (
        (Outcome.FILTERED, Outcome.EXPIRED, Outcome.FAILED)
        if entity == TRAINING_SAMPLES
        else (Outcome.EXPIRED, Outcome.FAILED)
    )


def belongs_on(entity: str, event: Event) -> bool:
    """Return whether an event belongs on a topic, given without the run's prefix.

    A worker's heartbeats and metrics belong on the topic of its role.
    """
    if isinstance(event, SampleEvaluated):
        return LOGPROB_TOPICS.get(event.model_role) == entity
    if isinstance(event, WorkerHeartbeat | MetricsReported):
        topics = HEARTBEATS if isinstance(event, WorkerHeartbeat) else METRICS
        return topics.get(event.role) == entity and event.worker_id.rpartition("-")[0] == event.role
    if entity.startswith("reward.scores."):  # the scores of another reward function for old samples
        entity = REWARD_SCORES
    return isinstance(event, EVENTS_ON.get(entity, ()))


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
        role: [ROLLOUT_SAMPLES] for role in ("reward", "judge", *TOPIC_BY_ROLE) if role in roles
    }
    evaluated = [entity for role, entity in TOPIC_BY_ROLE.items() if role in roles]
    scores = [REWARD_SCORES] if config.algorithm.has_rewards else []
    inputs = samples | {
        "advantage": [ROLLOUT_SAMPLES, *scores, *evaluated],
        "trainer": [*TRAINER_INPUTS],
    }
    if config.broker.prompt_queue == "consumer_group":
        inputs["rollout"] = [PROMPT_GROUPS]
    return {role: entities for role, entities in inputs.items() if role in roles}


def list_input_partitions(config: RunConfig, role: str) -> list[TopicPartition]:
    """Return every partition that a role reads by committed offsets."""
    plan = TopicPlan.from_config(config)
    return [
        (plan.topic(entity), partition)
        for entity in list_role_inputs(config)[role]
        for partition in range(
            plan.queue_partitions if entity == PROMPT_GROUPS else plan.num_sample_partitions
        )
    ]
