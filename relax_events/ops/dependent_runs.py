"""Runs that train this run's samples: which records they still need, up to the limit that this run
sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.errors import CheckFailed
from relax_events.events.types import PolicyVersionPublished
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.inventory import Inventory
from relax_events.session.broker_address import open_admin
from relax_events.topics import TopicPlan, compute_slot
from relax_events.topics.names import (
    DEPENDENT_RUN,
    NO_RECORDS_NEEDED,
    POLICY_VERSIONS,
    TRAINING_SAMPLES,
)
from relax_events.topics.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class DependentRun:
    """A run that replays this one; `offsets` are the offsets of the first records that it may still
    need, by topic partition.
    """

    run_id: str
    group: str
    offsets: Mapping[TopicPartition, int]

    def oldest_version(self, plan: TopicPlan, published: Iterable[PolicyVersionPublished]) -> int:
        """Return the oldest published version whose records it may still need; -1 without a
        published version.
        """
        oldest_in_slot: dict[int, int] = {}
        for event in sorted(published, key=lambda event: event.policy_version):
            slot = compute_slot(event.policy_version, num_slots=plan.num_slots)
            starts = [
                at for at in event.start_offsets if plan.parse_entity(at.topic) == TRAINING_SAMPLES
            ]
            if slot not in oldest_in_slot or all(
                self.offsets.get((plan.topic(TRAINING_SAMPLES), at.partition), 0) >= at.offset
                for at in starts
            ):
                oldest_in_slot[slot] = event.policy_version
        return min(oldest_in_slot.values(), default=-1)


def find_dependent_runs(plan: TopicPlan, admin: Admin, inventory: Inventory) -> list[DependentRun]:
    """Return the runs that have committed which records of this run they need; runs that have
    reached their goal need none.
    """
    topic_partitions = [
        (plan.topic(TRAINING_SAMPLES), partition) for partition in range(plan.num_sample_partitions)
    ]
    runs = []
    for group in inventory.groups("relax."):
        _, run_id, *role = group.split(".", 2)
        if role != [DEPENDENT_RUN] or run_id == plan.run_id:
            continue
        committed = admin.committed_offsets(group, topic_partitions)
        if committed and NO_RECORDS_NEEDED not in committed.values():
            runs.append(
                DependentRun(
                    run_id,
                    group,
                    {
                        topic_partition: committed.get(topic_partition, 0)
                        for topic_partition in topic_partitions
                    },
                )
            )
    return runs


def dependent_run_bounds(
    followers: Iterable[DependentRun], floor: Mapping[TopicPartition, int]
) -> dict[str, Mapping[TopicPartition, int]]:
    """Return the first offset that each dependent run needs, by a text that names it; records below
    `floor` are kept for none.
    """
    return {
        f"run {follower.run_id}, which trains these samples": {
            topic_partition: max(offset, floor.get(topic_partition, 0))
            for topic_partition, offset in follower.offsets.items()
        }
        for follower in followers
    }


def describe_dependent_runs(config: RunConfig) -> str:
    """Describe which runs train this run's samples, and how many more versions are kept for each.

    Raises:
        CheckFailed: One is so far behind that records which it needs are purged.
    """
    plan = TopicPlan.from_config(config)
    with closing(open_admin(config, name="followers")) as admin:
        if not admin.topics(plan.topic(POLICY_VERSIONS)):
            return "none: the run has not started"
        followers = find_dependent_runs(
            plan,
            admin,
            Inventory(
                Connection.from_config(config.broker, client_id=f"{config.run.id}.followers")
            ),
        )
        if not followers:
            return "none"
        with RunLog(config, name="followers") as log:
            published = [record.event for record in log.versions.values()]
        begins = admin.beginning_offsets(
            [topic_partition for follower in followers for topic_partition in follower.offsets]
        )
    newest, limit = max(event.policy_version for event in published), config.run.follower_versions
    texts = []
    for follower in followers:
        oldest = follower.oldest_version(plan, published)
        texts.append(
            f"run {follower.run_id} needs the samples of version {oldest} and later, the "
            f"newest is {newest}"
        )
        if lost := [
            topic_partition
            for topic_partition, offset in follower.offsets.items()
            if offset and offset < begins[topic_partition]
        ]:
            where = f"{lost[0][0]}[{lost[0][1]}]@{follower.offsets[lost[0]]}"
            raise CheckFailed(
                f"{texts[-1]}, and {where} is purged: run.follower_versions = {limit} keeps no "
                "more for it; raise it for future runs, or delete run "
                f"{follower.run_id} if it is abandoned"
            )
    return f"{'; '.join(texts)}; up to {limit} versions are kept for them"
