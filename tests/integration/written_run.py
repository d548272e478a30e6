"""Writes a run's log record by record, as its roles would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from event_samples import committed, ended, issued, published, ready, rolled_out, scored
from numpy.typing import NDArray

from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Command, Outcome, TopicOffset
from relax_events.events.types import (
    Event,
    RunCommanded,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord
from relax_events.ops.topic_apply import apply_topics
from relax_events.runtime.run_description import build_run_description
from relax_events.topics import TopicPlan, compute_shard

CODEC = EventCodec()


def normalise(reward: float, rewards: Sequence[float]) -> NDArray[np.float32]:
    """Return the advantages of grpo that a sample of a prompt group with these rewards has."""
    deviation = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
    advantage = (reward - np.mean(rewards)) / (deviation + 1e-6)
    return np.array([0, 0, advantage, advantage], np.float32)


class WrittenRun:
    """A run whose every record a test decides on."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.plan = config, TopicPlan.from_config(config)
        self.connection = Connection.from_config(config.broker, client_id=f"{config.run.id}.test")
        self.producer, self._admin = RecordProducer(self.connection), Admin(self.connection)
        apply_topics(config, self._admin)
        published_form = CODEC.published_form()
        self.producer.write(
            ProducerRecord(self.plan.topic("control.schemas"), schema, key=name.hex())
            for name, schema in published_form.items()
        )
        self._ready: dict[str, tuple[int, int, int]] = {}
        self._rows: dict[str, int] = {}

    def close(self) -> None:
        """Leave the broker."""
        self.producer.close()
        self._admin.close()

    def describe(self) -> None:
        """Write what the run is."""
        self._control("control.commands", build_run_description(self.config))

    def command(self, command: Command) -> None:
        """Command the whole run."""
        self._control("control.commands", RunCommanded(command=command, reason="of a test"))

    def publish(self, version: int) -> None:
        """Publish a version whose records begin where its partitions end now."""
        topic_partitions = [
            (topic, partition)
            for topic in self.plan.sample_topics()
            for partition in self.plan.partitions_of_version(version)
        ]
        starts = [
            TopicOffset(topic, partition, offset)
            for (topic, partition), offset in sorted(
                self._admin.end_offsets(topic_partitions).items()
            )
        ]
        self._control("control.policy-versions", published(version, start_offsets=starts))

    def issue(self, group_id: str, *, row: int) -> None:
        """Issue a prompt group."""
        self._rows[group_id] = row
        partition = compute_shard(group_id, shards=self.plan.queue_partitions)
        self.producer.write(
            [
                ProducerRecord(
                    self.plan.topic("prompt.groups"),
                    CODEC.encode(issued(group_id, row=row)),
                    key=group_id,
                    partition=partition,
                )
            ]
        )

    def generate(
        self,
        group_id: str,
        *,
        version: int,
        rewards: Sequence[float | None],
        worker_id: str = "rollout-0",
    ) -> None:
        """Generate a prompt group, and score and make ready those of its samples that have a
        reward."""
        common = {"version": version, "of": len(rewards), "row": self._rows[group_id]}
        group_rewards = [reward for reward in rewards if reward is not None]
        for index, reward in enumerate(rewards):
            completion = f"completion {index} of {group_id}"
            self.write_sample(
                "rollout.samples",
                rolled_out(group_id, index, **common, completion=completion, worker_id=worker_id),
            )
            if reward is not None:
                self.write_sample(
                    "reward.scores", scored(group_id, index, version=version, reward=reward)
                )
                self.write_sample(
                    "advantage.samples",
                    ready(
                        group_id,
                        index,
                        **common,
                        reward=reward,
                        advantages=normalise(reward, group_rewards),
                    ),
                )
                topic_partition = (
                    self.plan.topic("advantage.samples"),
                    self.plan.partition(group_id, version),
                )
                self._ready[f"{group_id}/{index}"] = (
                    topic_partition[1],
                    self._admin.end_offsets([topic_partition])[topic_partition] - 1,
                    version,
                )

    def train(self, step: int, *group_ids: str) -> None:
        """Train prompt groups in a step, and publish its version."""
        sample_ids = sorted(name for name in self._ready if name.rpartition("/")[0] in group_ids)
        partitions, offsets, versions = zip(
            *(self._ready[name] for name in sample_ids), strict=True
        )
        layout = {
            "partitions": np.array(partitions, np.int32),
            "offsets": np.array(offsets, np.int64),
        }
        zeros = np.zeros(len(sample_ids), np.int32)
        counts = np.bincount(step - np.array(versions)).tolist()
        event = committed(
            step,
            prompt_group_ids=list(group_ids),
            sample_ids=sample_ids,
            **layout,
            ranks=zeros,
            micro_batches=zeros,
            staleness_counts=counts,
        )
        self._control("control.train-steps", event)
        for group_id in group_ids:
            version = next(self._ready[name][2] for name in sample_ids if name.startswith(group_id))
            self.end(group_id, Outcome.TRAINED, version=version, trainer_version=step)
        self.publish(step + 1)

    def commit(self, step: int, **fields: Any) -> TrainStepCommitted:
        """Commit a step with fields chosen by the test, and publish its version."""
        event = committed(step, **fields)
        self._control("control.train-steps", event)
        self.publish(step + 1)
        return event

    def end_offset(self, topic_partition: tuple[str, int]) -> int:
        """Return where a partition ends now."""
        return self._admin.end_offsets([topic_partition])[topic_partition]

    def end(
        self, group_id: str, outcome: Outcome, *, version: int, trainer_version: int | None = None
    ) -> None:
        """End a prompt group."""
        event = ended(
            group_id,
            outcome,
            version=version,
            reason="" if outcome is Outcome.TRAINED else "because",
        )
        self._control(
            "control.prompt-group-outcomes",
            replace(event, trainer_version=version if trainer_version is None else trainer_version),
        )

    def write_sample(
        self, entity: str, event: SampleRolledOut | SampleScored | SampleReady
    ) -> None:
        """Write a record to a sample topic."""
        self.write_bytes(
            entity,
            CODEC.encode(event),
            group_id=event.prompt_group_id,
            version=event.policy_version,
        )

    def write_bytes(self, entity: str, value: bytes, *, group_id: str, version: int) -> None:
        """Write any bytes to the partition of a sample's record."""
        partition, headers = (
            self.plan.partition(group_id, version),
            {POLICY_VERSION_HEADER: str(version)},
        )
        self.producer.write(
            [
                ProducerRecord(
                    self.plan.topic(entity),
                    value,
                    key=group_id,
                    partition=partition,
                    headers=headers,
                )
            ]
        )

    def _control(self, entity: str, event: Event) -> None:
        self.producer.write(
            [ProducerRecord(self.plan.topic(entity), CODEC.encode(event), partition=0)]
        )
