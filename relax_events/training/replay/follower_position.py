"""Commits which records of the parent run a replay still needs, so that the parent's retention
keeps them.

    training steps of the parent --> a checkpoint, named by a committed step --> the offsets of the
    steps after it are committed

Below these offsets are no steps that would be trained again from the newest checkpoint. They are
committed to a consumer group of the replay, which has no members. `run.follower_versions` of the
parent bounds how long they count.
"""

from __future__ import annotations

import structlog

from relax_events.errors import BrokerError
from relax_events.events.parts import CheckpointRef, TopicOffset
from relax_events.events.types import TrainStepCommitted
from relax_events.kafka.admin import Admin
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.topics.names import DEPENDENT_RUN, NO_RECORDS_NEEDED, TRAINING_SAMPLES

log = structlog.get_logger()


class FollowerPosition:
    """The position of one replay; a broker error here does not stop the replay."""

    def __init__(self, worker: Worker) -> None:
        plan = worker.plan
        self._admin, self._group = Admin(worker.connection), plan.consumer_group(DEPENDENT_RUN)
        self._topic_partitions = [
            (plan.topic(TRAINING_SAMPLES), partition)
            for partition in range(plan.num_sample_partitions)
        ]
        self._consumed: dict[int, int] = {}
        self._offsets_by_version: dict[int, dict[int, int]] = {}
        self._newest_checkpoint: CheckpointRef | None = None
        self._committed_checkpoint: CheckpointRef | None = None

    def retain_all(self) -> None:
        """Retain all existing records, unless an earlier process of this replay has committed a
        position.
        """
        try:
            offsets = self._admin.committed_offsets(self._group, self._topic_partitions)
        except BrokerError as error:
            log.warning("follower_position.read_failed", error=str(error))
            return
        if NO_RECORDS_NEEDED in offsets.values() or not offsets:
            self._commit(dict.fromkeys((partition for _, partition in self._topic_partitions), 0))

    def add_trained_step(self, step: TrainStepCommitted, checkpoint: CheckpointRef | None) -> None:
        """Add a trained step of the parent; `checkpoint` is the newest one that the replay's step
        names.
        """
        for at in (
            at for at in step.consumed if TopicPlan.parse_entity(at.topic) == TRAINING_SAMPLES
        ):
            self._consumed[at.partition] = max(at.offset, self._consumed.get(at.partition, 0))
        self._offsets_by_version[step.train_step + 1] = dict(self._consumed)
        self._newest_checkpoint = checkpoint

    def commit_steps(self) -> None:
        """Commit the position of the newest checkpoint, once all trained steps are committed."""
        if self._newest_checkpoint is None or self._newest_checkpoint == self._committed_checkpoint:
            return
        version = self._newest_checkpoint.policy_version
        if (offsets := self._offsets_by_version.get(version)) is not None:
            self._commit(offsets)
        self._committed_checkpoint = self._newest_checkpoint
        self._offsets_by_version = {
            at: offsets for at, offsets in self._offsets_by_version.items() if at > version
        }

    def release_all(self) -> None:
        """Release all records of the parent."""
        self._commit(
            dict.fromkeys((partition for _, partition in self._topic_partitions), NO_RECORDS_NEEDED)
        )

    def close(self) -> None:
        """Close the client."""
        self._admin.close()

    def _commit(self, offsets: dict[int, int]) -> None:
        topic = self._topic_partitions[0][0]
        try:
            self._admin.set_committed_offsets(
                self._group,
                [
                    TopicOffset(topic, partition, offset)
                    for partition, offset in sorted(offsets.items())
                ],
            )
        except BrokerError as error:
            log.warning(
                "follower_position.commit_failed", consumer_group=self._group, error=str(error)
            )
