"""A run that replays another one holds back that run's purge, for as many versions as the parent's
settings allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from event_samples import committed

from relax_events.config import RunConfig
from relax_events.errors import CheckFailed
from relax_events.events.parts import CheckpointRef, TopicOffset
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.objects import ObjectStore
from relax_events.ops.consumer_lag import read_partition_lag
from relax_events.ops.dependent_runs import describe_dependent_runs
from relax_events.ops.run_purger import PlannedPurge, open_purge
from relax_events.topics import TopicPlan
from relax_events.training.replay.follower_position import FollowerPosition
from tests.integration.test_topic_tools import STEPS, SmallRun

ALL = {0: 2, 1: 2, 2: 2}
"""Steps 0 to 2 trained two samples each, of a partition each; what may go of them before the
checkpoint at version 3."""
NONE = {0: 0, 1: 0, 2: 0}


@pytest.fixture
def source(
    apply_run: Callable[..., RunConfig],
    connection: Connection,
    admin: Admin,
    producer: RecordProducer,
) -> SmallRun:
    config = apply_run(
        run={"max_staleness": 1, "num_steps": STEPS},
        broker={"partitions_per_version": 1, "queue_partitions": 1},
    )
    run = SmallRun(config, TopicPlan.from_config(config), connection, admin)
    store = ObjectStore.open(config.objects_uri)
    shard = store.put_at("checkpoints/00000003/a/shard.safetensors", b"tensors")
    manifest = store.put_at(
        "checkpoints/00000003/a/manifest.json", orjson.dumps({"shards": [{"uri": shard.uri}]})
    )
    run.write(producer, checkpoint=CheckpointRef(3, manifest.uri, manifest.digest))
    run.commit_all()
    return run


@pytest.fixture
def replay(source: SmallRun) -> Iterator[FollowerPosition]:
    run = source.config.run
    config = source.config.model_copy(
        update={
            "run": run.model_copy(update={"id": f"{run.id}-again"}),
            "parent": source.config.parent.model_copy(update={"run": run.id, "follow": True}),
        }
    )
    worker: Any = SimpleNamespace(plan=TopicPlan.from_config(config), connection=source.connection)
    position = FollowerPosition(worker)
    yield position
    position.close()


def keeping(source: SmallRun, num_versions: int) -> RunConfig:
    """Return the source that keeps so many versions for those that replay it."""
    return source.config.model_copy(
        update={"run": source.config.run.model_copy(update={"follower_versions": num_versions})}
    )


@contextmanager
def planned(config: RunConfig) -> Iterator[PlannedPurge]:
    with open_purge(config, before_version=4) as purge:
        yield purge


def trained_records_that_go(config: RunConfig) -> dict[int, int]:
    with planned(config) as purge:
        return {
            cut.topic_partition[1]: cut.num_records
            for cut in purge.ranges
            if "advantage.samples" in cut.topic_partition[0]
        }


def train(
    replay: FollowerPosition, source: SmallRun, step: int, *, checkpoint: int | None = None
) -> None:
    at = TopicOffset(source.plan.topic("advantage.samples"), step % 3, 2)
    replay.add_trained_step(
        committed(step, consumed=[at]),
        CheckpointRef(checkpoint, "memory://c", bytes(32)) if checkpoint else None,
    )
    replay.commit_steps()


def test_purge_keeps_records_not_covered_by_a_replays_checkpoint(
    source: SmallRun, replay: FollowerPosition
) -> None:
    assert trained_records_that_go(source.config) == ALL
    replay.retain_all()
    assert trained_records_that_go(source.config) == NONE
    train(replay, source, 0)
    train(replay, source, 1)
    assert trained_records_that_go(source.config) == NONE, (
        "after a crash it would train from its beginning again"
    )
    train(replay, source, 2, checkpoint=2)
    assert trained_records_that_go(source.config) == {0: 2, 1: 2, 2: 0}
    with planned(source.config) as purge:
        held_by = {
            cut.held_by for cut in purge.ranges if "advantage.samples" in cut.topic_partition[0]
        }
        assert purge.apply()["advantage.samples"] == 4
    assert f"run {source.config.run.id}-again, which trains these samples" in held_by


def test_restarted_replay_releases_records_covered_by_its_checkpoint(
    source: SmallRun, replay: FollowerPosition
) -> None:
    replay.retain_all()
    train(replay, source, 0)
    train(replay, source, 1, checkpoint=1)
    replay.retain_all()
    assert trained_records_that_go(source.config) == {0: 2, 1: 0, 2: 0}


def test_finished_replay_retains_no_records_and_is_not_listed(
    source: SmallRun, replay: FollowerPosition
) -> None:
    replay.retain_all()
    assert {row.role for row in read_partition_lag(source.config, source.admin)} >= {
        f"run {source.config.run.id}-again"
    }
    replay.release_all()
    assert trained_records_that_go(source.config) == ALL
    assert describe_dependent_runs(source.config) == "none"
    replay.retain_all()
    assert trained_records_that_go(source.config) == NONE, "it was given another goal"


@pytest.mark.parametrize(
    ("num_versions", "gone"), [(0, ALL), (1, ALL), (3, {0: 2, 1: 0, 2: 0}), (4, NONE)]
)
def test_abandoned_replay_retains_no_more_versions_than_the_source_allows(
    source: SmallRun, replay: FollowerPosition, num_versions: int, gone: dict[int, int]
) -> None:
    replay.retain_all()
    assert trained_records_that_go(keeping(source, num_versions)) == gone


def test_lag_and_doctor_show_the_progress_of_a_replay(
    source: SmallRun, replay: FollowerPosition
) -> None:
    replay.retain_all()
    train(replay, source, 0)
    train(replay, source, 1, checkpoint=1)
    name = f"run {source.config.run.id}-again"
    rows = {
        row.topic_partition[1]: row.num_records
        for row in read_partition_lag(source.config, source.admin)
        if row.role == name
    }
    assert rows == {0: 2, 1: 4, 2: 2}
    assert describe_dependent_runs(source.config) == (
        f"{name} needs the samples of version 1 and later, the newest is 5; up to 200 "
        "versions are kept for them"
    )
    tight = keeping(source, 1)
    source.admin.set_committed_offsets(
        replay._group, [TopicOffset(source.plan.topic("advantage.samples"), 1, 1)]
    )
    with planned(tight) as purge:
        purge.apply()
    with pytest.raises(
        CheckFailed,
        match=r"advantage.samples\[1\]@1 is purged: run.follower_versions = 1 keeps no more for it",
    ):
        describe_dependent_runs(tight)
