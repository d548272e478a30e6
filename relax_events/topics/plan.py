"""Every topic of a run, declared in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_events.config import RunConfig
from relax_events.topics.partitions import num_slots, partition_of, partitions_of_slot, slot_of

SAMPLE_TOPICS = {
    "rollout.samples": "SampleRolledOut, one for each generated sample",
    "reward.scores": "SampleScored, one for each sample",
    "reference.logprobs": "SampleEvaluated by the reference model",
    "actor.logprobs": "SampleEvaluated by the actor-forward role",
    "advantage.samples": "SampleReady for the trainer, and PromptGroupEnded for prompt groups that won't be trained",
}
CONTROL_TOPICS = {
    "control.policy-versions": "PolicyVersionPublished: which weights may be used, and where their records begin",
    "control.train-steps": "TrainStepCommitted: what each step trained on and what came out",
    "control.group-outcomes": "PromptGroupEnded: how each prompt group ended, decided by the trainer",
    "control.commands": "RunCommanded: what the controller asks for",
    "control.metrics": "MetricsReported: figures of every worker",
}
COMPACTED_TOPICS = {
    "control.heartbeats": "WorkerBeat, newest by worker",
    "control.schemas": "writer schemas as JSON, by fingerprint",
}
DEAD_LETTER_ROLES = ("rollout", "reward", "reference", "actor-forward", "advantage", "trainer")
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
    """The run's topics, consumer groups and transactional ids, and the arithmetic of its partitions."""

    run_id: str
    max_staleness: int
    shards: int
    queue_partitions: int
    replication_factor: int
    compression: str

    @classmethod
    def of(cls, config: RunConfig) -> TopicPlan:
        """Read the plan off a run's configuration."""
        broker = config.broker
        return cls(config.run.id, config.run.max_staleness, broker.shards, broker.queue_partitions, broker.replication_factor, broker.compression)

    @property
    def num_slots(self) -> int:
        """Slots in the policy-version ring."""
        return num_slots(self.max_staleness)

    @property
    def num_sample_partitions(self) -> int:
        """Partitions of every sample topic."""
        return self.num_slots * self.shards

    def topic(self, entity: str) -> str:
        """Return the full name of a topic, for example of `rollout.samples`."""
        return f"relax.{self.run_id}.{entity}"

    def consumer_group(self, role: str) -> str:
        """Return the role's consumer group (or share group)."""
        return f"relax.{self.run_id}.{role}"

    def transactional_id(self, role: str) -> str:
        """Return the transactional id of a role that has one active instance."""
        return f"relax.{self.run_id}.{role}.0"

    def partition(self, prompt_group_id: str, policy_version: int) -> int:
        """Return the partition of a prompt group's samples."""
        return partition_of(prompt_group_id, policy_version, num_slots=self.num_slots, shards=self.shards)

    def partitions_of_version(self, policy_version: int) -> range:
        """Return the partitions of the slot that the version owns."""
        return partitions_of_slot(slot_of(policy_version, num_slots=self.num_slots), shards=self.shards)

    def sample_topics(self) -> list[str]:
        """Return the full names of the sample topics, which all have the same partitions."""
        return [self.topic(entity) for entity in SAMPLE_TOPICS]

    def specs(self) -> list[TopicSpec]:
        """Return every topic of the run."""
        queue = {"prompt.groups": "PromptGroupIssued: the rollout workers' queue"}
        rest = "could not use, untouched, with the error in their headers"
        letters = {f"{role}.dead-letters": f"records that {role} {rest}" for role in DEAD_LETTER_ROLES}
        return [
            *self._specs(queue, self.queue_partitions),
            *self._specs(SAMPLE_TOPICS, self.num_sample_partitions, {"compression.type": self.compression.replace("none", "uncompressed")}),
            *self._specs(CONTROL_TOPICS, 1),
            *self._specs(COMPACTED_TOPICS, 1, {"cleanup.policy": "compact"}),
            *self._specs(letters, 1),
        ]

    def _specs(self, entities: dict[str, str], num_partitions: int, settings: dict[str, str] | None = None) -> list[TopicSpec]:
        base = {
            "message.timestamp.type": "LogAppendTime",
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "max.message.bytes": str(MAX_RECORD_BYTES),
            "min.insync.replicas": str(min(2, self.replication_factor)),
        }
        every = base | (settings or {})
        return [TopicSpec(self.topic(entity), num_partitions, self.replication_factor, doc, every) for entity, doc in entities.items()]
