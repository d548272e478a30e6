"""Every topic of a run, declared in one place.

Where a run that trains another run's samples tells how far it is: committed offsets of a group that
nobody is a member of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.topics.partitions import num_slots, partition_of, partitions_of_slot, slot_of

QUEUE_TOPICS = {"prompt.groups": "PromptGroupIssued: the rollout workers' queue"}
EVALUATOR_TOPICS = {
    "reference": "reference.logprobs",
    "actor": "actor.logprobs",
    "critic": "critic.values",
    "teacher": "teacher.logprobs",
}
"""Where SampleEvaluated goes, by the name that its evaluator has in it."""
SAMPLE_TOPICS = {
    "rollout.samples": "SampleRolledOut, one for each generated sample",
    "reward.scores": "SampleScored, one for each sample",
    "reference.logprobs": "SampleEvaluated by the reference model",
    "actor.logprobs": "SampleEvaluated by the actor-forward role",
    "critic.values": "SampleEvaluated by the critic",
    "teacher.logprobs": "SampleEvaluated by the teacher",
    "advantage.samples": (
        "SampleReady for the trainer, and PromptGroupEnded where the advantage role ends a "
        "prompt group; it alone writes here"
    ),
    "prompt.end-requests": (
        "PromptGroupEnded: other roles ask the trainer to end a prompt group that failed or expired"
    ),
}
TRAINED_FROM = "advantage.samples"
END_REQUESTS = "prompt.end-requests"
TRAINER_INPUTS = (TRAINED_FROM, END_REQUESTS)
"""What the trainer reads, from positions that it commits with its steps."""
TRAINER_NEIGHBOUR = "advantage"
"""The role that writes what is trained. Other roles' requests have a topic of their own, so that
none of them may write samples."""
CONTROL_TOPICS = {
    "control.policy-versions": (
        "PolicyVersionPublished: which weights may be used, where their records begin, and what "
        "the log holds before them"
    ),
    "control.train-steps": "TrainStepCommitted: what each step trained on and what came out",
    "control.group-outcomes": "PromptGroupEnded: how each prompt group ended, decided by the trainer",
    "control.commands": "RunCommanded: what the controller asks for; RunDescribed: the run file",
    "control.evaluations": "PolicyEvaluated: how good a version is on a dataset",
    "control.schemas": (
        "writer schemas as JSON, by fingerprint; never compacted, so that no writer can take "
        "another one's away"
    ),
}
ROLES = (
    "prompter",
    "rollout",
    "reward",
    "judge",
    "reference",
    "actor-forward",
    "critic",
    "teacher",
    "advantage",
    "trainer",
    "evaluator",
    "controller",
    "metrics",
)
HEARTBEATS = {role: f"control.heartbeats.{role}" for role in ROLES}
METRICS = {role: f"control.metrics.{role}" for role in ROLES}
"""A topic for each role, which it alone may write: no role can speak for another one's workers."""
OF_ROLES = frozenset({*HEARTBEATS.values(), *METRICS.values()})
REPORT_TOPICS = {
    entity: f"MetricsReported: metrics of the workers of {role}, kept for a while"
    for role, entity in METRICS.items()
}
COMPACTED_TOPICS = {
    **{entity: f"WorkerBeat, newest by worker of {role}" for role, entity in HEARTBEATS.items()},
    "control.engines": "EnginesEnlisted: the newest list of engines that the trainer sends new weights to",
}
SUMMARY_TOPICS = {"control.summaries": "PromptsSummed: the prompter's state, the newest"}
_DAY_MS = 86_400_000
BOUNDED_REPORTS = {
    "retention.ms": str(7 * _DAY_MS),
    "retention.bytes": str(256 << 20),
    "segment.bytes": str(16 << 20),
    "segment.ms": str(_DAY_MS),
}
"""Nobody needs old reports to go on: the metrics role has them in the run's folder, and at the
trackers."""
COMPACTION = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
}
"""Only closed files are compacted. Heartbeats come every second for weeks, and with files of 1 GiB,
the default, every one of them would be read by whoever starts."""
MAP_ROLES = ("reward", "judge", "reference", "actor-forward", "critic", "teacher")
"""Roles that look at each sample by itself and write one event for it."""
CONSUMER_ROLES = (*MAP_ROLES, "advantage")
"""Roles whose workers share their topics' partitions as a consumer group."""
DEAD_LETTER_ROLES = ("rollout", *CONSUMER_ROLES, "trainer")
SCORES_PATTERN = re.compile("[a-z0-9][a-z0-9_-]{0,47}")
MAX_RECORD_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as it should be."""

    name: str
    num_partitions: int
    replication_factor: int
    doc: str
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The run's topics, consumer groups and transactional ids, and the arithmetic of its
    partitions.
    """

    run_id: str
    max_staleness: int
    shards: int
    queue_partitions: int
    replication_factor: int
    compression: str
    source_run_id: str = ""
    """A replay has no prompts and samples of its own: they are those of this run."""
    segment_seconds: float = 0.0
    """After so long a file of the log is closed, so that it can go when its records are purged; 0
    leaves that to the broker."""
    roles: tuple[str, ...] = ROLES
    """Those of the run, which have topics of heartbeats and metrics."""

    @classmethod
    def of(cls, config: RunConfig) -> TopicPlan:
        """Read the plan off a run's configuration."""
        broker = config.broker
        return cls(
            run_id=config.run.id,
            max_staleness=config.run.max_staleness,
            shards=broker.shards,
            queue_partitions=broker.queue_partitions,
            replication_factor=broker.replication_factor,
            compression=broker.compression,
            source_run_id=config.source.run if config.is_replay else "",
            segment_seconds=broker.segment_seconds if config.run.retain_versions else 0.0,
            roles=tuple(role for role in ROLES if role in config.roles()),
        )

    @property
    def num_slots(self) -> int:
        """Slots in the policy-version ring."""
        return num_slots(self.max_staleness)

    @property
    def num_sample_partitions(self) -> int:
        """Partitions of every sample topic."""
        return self.num_slots * self.shards

    def topic(self, entity: str) -> str:
        """Return the full name of a topic, for example of `rollout.samples`; a replay's sample
        topics are its source's.
        """
        is_sample_topic = (
            entity in QUEUE_TOPICS or entity in SAMPLE_TOPICS or entity.startswith("reward.scores.")
        )
        return self.topic_of(
            self.source_run_id if self.source_run_id and is_sample_topic else self.run_id, entity
        )

    @staticmethod
    def topic_of(run_id: str, entity: str) -> str:
        """Return the full name of a run's own topic."""
        return f"relax.{run_id}.{entity}"

    @staticmethod
    def entity(topic: str) -> str:
        """Return what a full topic name says besides its run, for example `rollout.samples`; a run
        id holds no dot.
        """
        return topic.split(".", 2)[-1]

    def end_requests(self, role: str) -> str:
        """Return the entity to which a role writes when it asks for the end of a prompt group."""
        return TRAINED_FROM if role == TRAINER_NEIGHBOUR else END_REQUESTS

    def consumer_group(self, role: str) -> str:
        """Return the role's consumer group (or share group)."""
        return f"relax.{self.run_id}.{role}"

    def transactional_id(self, role: str) -> str:
        """Return the transactional id of a role that has one active instance."""
        return f"relax.{self.run_id}.{role}.0"

    def partition(self, prompt_group_id: str, policy_version: int) -> int:
        """Return the partition of a prompt group's samples."""
        return partition_of(
            prompt_group_id, policy_version, num_slots=self.num_slots, shards=self.shards
        )

    def partitions_of_version(self, policy_version: int) -> range:
        """Return the partitions of the slot that the version owns."""
        return partitions_of_slot(
            slot_of(policy_version, num_slots=self.num_slots), shards=self.shards
        )

    def sample_topics(self) -> list[str]:
        """Return the full names of the run's own sample topics, which all have the same partitions;
        a replay has none.
        """
        return [] if self.source_run_id else [self.topic(entity) for entity in SAMPLE_TOPICS]

    def specs(self) -> list[TopicSpec]:
        """Return every topic of the run's own."""
        rest = "could not use, untouched, with the error in their headers"
        roles = ("trainer",) if self.source_run_id else DEAD_LETTER_ROLES
        letters = {f"{role}.dead-letters": f"records that {role} {rest}" for role in roles}
        return [
            *self._sample_specs(),
            *self._specs(CONTROL_TOPICS, 1),
            *self._specs(self._present(REPORT_TOPICS), 1, BOUNDED_REPORTS),
            *self._specs(self._present(COMPACTED_TOPICS), 1, COMPACTION),
            *self._specs(
                SUMMARY_TOPICS, 1, COMPACTION | {"segment.bytes": str(2 * MAX_RECORD_BYTES)}
            ),
            *self._specs(letters, 1),
        ]

    def _present(self, entities: Mapping[str, str]) -> dict[str, str]:
        return {entity: doc for entity, doc in entities.items() if self.has(entity)}

    def has(self, entity: str) -> bool:
        """Tell whether a topic of reports is of a role that the run has; any other topic is the
        run's.
        """
        return entity not in OF_ROLES or entity.rpartition(".")[-1] in self.roles

    def scores_entity(self, name: str) -> str:
        """Return the topic, without its run, of scores that another reward function gave to old
        samples.

        Raises:
            ConfigError: The name is unfit for a topic.
        """
        if not SCORES_PATTERN.fullmatch(name):
            rule = "1 to 48 of a-z, 0-9, '-' and '_', with a letter or digit first"
            raise ConfigError(f"the name of scores must be {rule}, got {name!r}; set --name")
        return f"reward.scores.{name}"

    def scores_spec(self, name: str) -> TopicSpec:
        """Return that topic as it should be; it is made when samples are rescored, and is no part
        of `specs`.
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


FOLLOWER = "follower"
SAMPLES = "advantage.samples"
NEEDS_NOTHING = 2**62
"""The committed offset of a follower that has reached its goal: no record lies behind it."""
