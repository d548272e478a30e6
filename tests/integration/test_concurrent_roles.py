"""A sample role that processes many samples concurrently writes each when it is done; unfinished
samples are processed by its successor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import rolled_out, scored

from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.objects import ObjectStore
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime.concurrent_processor import ConcurrentLoop, Done, Key
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan

CODEC = EventCodec()
GROUP = "000000-0000-0"
NAMES = [f"{GROUP}/{index}" for index in range(3)]


class Holding:
    """Work that is done once its sample's index is released."""

    def __init__(self) -> None:
        self.capacity = 8
        self.released: set[int] = set()
        self.held: dict[Key, SampleRolledOut] = {}
        self.worker: Worker

    @property
    def progress(self) -> int:
        return len(self.held)

    def submit(self, key: Key, sample: SampleRolledOut) -> None:
        self.held[key] = sample

    def poll(self, *, timeout_seconds: float) -> list[Done]:
        done = [
            key for key, sample in self.held.items() if sample.key.sample_index in self.released
        ]
        threading.Event().wait(0.0 if done else timeout_seconds / 10)
        return [(key, (self._answer(self.held.pop(key)),)) for key in done]

    def cancel(self, keys: Collection[Key]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def _answer(self, sample: SampleRolledOut) -> ProducerRecord:
        version = sample.policy_version
        event = scored(sample.prompt_group_id, sample.key.sample_index, version=version)
        return self.worker.records.build_for_sample(
            "reward.scores", event, prompt_group_id=sample.prompt_group_id, policy_version=version
        )


@pytest.fixture
def config(apply_run: Callable[..., RunConfig]) -> RunConfig:
    return apply_run(
        broker={"partitions_per_version": 1},
        workers={"drain_seconds": 0.5, "heartbeat_seconds": 0.2},
    )


@pytest.fixture
def plan(config: RunConfig) -> TopicPlan:
    return TopicPlan.from_config(config)


@pytest.fixture
def role(config: RunConfig, tmp_path: Path) -> Callable[[Holding], AbstractContextManager[None]]:
    """Return what runs a role with this work, until the block ends."""

    @contextmanager
    def run(flow: Holding) -> Iterator[None]:
        store = ObjectStore.open((tmp_path / "objects").as_uri())
        with Worker(
            "reward", config, claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6)
        ) as flow.worker:
            thread = threading.Thread(target=ConcurrentLoop(flow.worker, flow).run)
            thread.start()
            try:
                yield
            finally:
                flow.worker.drain.start()
                thread.join(TIMEOUT_SECONDS)
                assert not thread.is_alive()

    return run


@pytest.fixture
def written(producer: RecordProducer, plan: TopicPlan) -> None:
    """Write three samples into one partition."""
    producer.write(
        ProducerRecord(
            plan.topic("rollout.samples"),
            CODEC.encode(sample),
            key=GROUP,
            partition=plan.partition(GROUP, 0),
            headers={"policy-version": "0"},
        )
        for sample in (rolled_out(GROUP, index, of=3) for index in range(3))
    )


def answered(connection: Connection, plan: TopicPlan) -> list[str]:
    reader = LogReader(connection)
    try:
        records = reader.read_to_end([(plan.topic("reward.scores"), plan.partition(GROUP, 0))])
    finally:
        reader.close()
    return [
        event.sample_id
        for record in records
        for event in split_samples(CODEC.decode(record.value))
        if isinstance(event, SampleScored)
    ]


def committed(admin: Admin, plan: TopicPlan) -> int:
    topic_partition = (plan.topic("rollout.samples"), plan.partition(GROUP, 0))
    return admin.committed_offsets(plan.consumer_group("reward"), [topic_partition]).get(
        topic_partition, 0
    )


@pytest.mark.usefixtures("written")
def test_results_complete_out_of_order_and_the_offset_waits_for_the_oldest(
    role: Callable[[Holding], AbstractContextManager[None]],
    plan: TopicPlan,
    connection: Connection,
    admin: Admin,
) -> None:
    flow = Holding()
    flow.released = {2}
    with role(flow):
        turn_until(lambda: answered(connection, plan) == NAMES[2:])
        flow.released = {0, 2}
        turn_until(lambda: answered(connection, plan) == [NAMES[2], NAMES[0]])
        turn_until(lambda: committed(admin, plan) == 1)
        flow.released = {0, 1, 2}
        turn_until(lambda: committed(admin, plan) == 3)
    assert sorted(answered(connection, plan)) == NAMES


@pytest.mark.usefixtures("written")
def test_drain_leaves_unfinished_samples_to_the_next_worker(
    role: Callable[[Holding], AbstractContextManager[None]],
    plan: TopicPlan,
    connection: Connection,
    admin: Admin,
) -> None:
    flow = Holding()
    flow.released = {0, 2}
    with role(flow):
        turn_until(lambda: sorted(answered(connection, plan)) == [NAMES[0], NAMES[2]])
    assert committed(admin, plan) == 1
    successor = Holding()
    successor.released = {0, 1, 2}
    with role(successor):
        turn_until(lambda: committed(admin, plan) == 3)
    assert sorted(answered(connection, plan)) == [*NAMES, NAMES[2]], (
        "the last one again, and the join keeps the first copy"
    )
