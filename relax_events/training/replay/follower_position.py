"""Tells a replay's source which of its records the replay still needs, so that the source's purge
leaves them.

    training steps of the source --> a checkpoint, named by a committed step --> offsets of the
    steps behind it are committed

The offsets are those below which no step lies that would be trained again from the newest
checkpoint. They are committed to a consumer group of the replay's own, which has no members.
`run.follower_versions` of the source bounds for how long they count.
"""

from __future__ import annotations

import structlog

from relax_events.errors import BrokerError
from relax_events.events.parts import CheckpointRef, TopicOffset
from relax_events.events.types import TrainStepCommitted
from relax_events.kafka.admin import Admin
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.topics.plan import FOLLOWER, NEEDS_NOTHING, SAMPLES

log = structlog.get_logger()


class FollowerPosition:
    """Of one replay; a broker that refuses costs the source's patience, not the replay's steps."""

    def __init__(self, worker: Worker) -> None:
        plan = worker.plan
        self._admin, self._group = Admin(worker.connection), plan.consumer_group(FOLLOWER)
        self._places = [
            (plan.topic(SAMPLES), partition) for partition in range(plan.num_sample_partitions)
        ]
        self._consumed: dict[int, int] = {}
        self._behind: dict[int, dict[int, int]] = {}
        self._named: CheckpointRef | None = None
        self._told: CheckpointRef | None = None

    def begin(self) -> None:
        """Have everything kept that is there, unless an earlier process of this replay has told
        what it needs.
        """
        try:
            found = self._admin.committed(self._group, self._places)
        except BrokerError as error:
            log.warning("follower_position.unknown", error=str(error))
            return
        if NEEDS_NOTHING in found.values() or not found:
            self._commit(dict.fromkeys((partition for _, partition in self._places), 0))

    def trained(self, step: TrainStepCommitted, checkpoint: CheckpointRef | None) -> None:
        """Note that this step of the source is trained; `checkpoint` is the newest one that our own
        step names.
        """
        for at in (at for at in step.consumed if TopicPlan.entity(at.topic) == SAMPLES):
            self._consumed[at.partition] = max(at.offset, self._consumed.get(at.partition, 0))
        self._behind[step.train_step + 1] = dict(self._consumed)
        self._named = checkpoint

    def committed(self) -> None:
        """Note that all steps trained so far are committed: what lies behind their newest
        checkpoint is needed no more.
        """
        if self._named is None or self._named == self._told:
            return
        version = self._named.policy_version
        if (offsets := self._behind.get(version)) is not None:
            self._commit(offsets)
        self._told = self._named
        self._behind = {at: offsets for at, offsets in self._behind.items() if at > version}

    def finished(self) -> None:
        """Say that nothing of the source is needed any more."""
        self._commit(dict.fromkeys((partition for _, partition in self._places), NEEDS_NOTHING))

    def close(self) -> None:
        """Leave the broker."""
        self._admin.close()

    def _commit(self, offsets: dict[int, int]) -> None:
        topic = self._places[0][0]
        try:
            self._admin.set_committed(
                self._group,
                [
                    TopicOffset(topic, partition, offset)
                    for partition, offset in sorted(offsets.items())
                ],
            )
        except BrokerError as error:
            log.warning("follower_position.untold", consumer_group=self._group, error=str(error))
