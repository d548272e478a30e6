"""A sample role writes one record for each sample, commits afterwards, skips expired samples, and
keeps unusable records as dead letters.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import evaluated, published, rolled_out

from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import TopicOffset
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import PromptGroupEnded, SampleEvaluated, SampleRolledOut
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.objects import ObjectStore
from relax_events.objects.claim_check import store_array
from relax_events.objects.outages import outages
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan

CODEC = EventCodec()


@pytest.fixture
def config(apply_run: Callable[..., RunConfig]) -> RunConfig:
    return apply_run(
        run={"max_staleness": 1},
        broker={"partitions_per_version": 1},
        algorithm={"kl_coefficient": 0.1},
    )


@pytest.fixture
def plan(config: RunConfig) -> TopicPlan:
    return TopicPlan.from_config(config)


@pytest.fixture
def role(config: RunConfig, tmp_path: Path) -> Callable[[], AbstractContextManager[Worker]]:
    """Return a context manager that runs the reference role, with a forward pass that returns
    zeros."""

    @contextmanager
    def run() -> Iterator[Worker]:
        store = ObjectStore.open((tmp_path / "objects").as_uri())
        with Worker(
            "reference",
            config,
            claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6),
        ) as worker:

            def handle(samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
                return [
                    worker.records.build_for_sample(
                        "reference.logprobs",
                        evaluated(
                            sample.prompt_group_id,
                            sample.key.sample_index,
                            version=sample.policy_version,
                        ),
                        prompt_group_id=sample.prompt_group_id,
                        policy_version=sample.policy_version,
                    )
                    for sample in samples
                ]

            thread = threading.Thread(target=SampleLoop(worker, handle).run)
            thread.start()
            try:
                yield worker
            finally:
                worker.drain.start()
                thread.join(TIMEOUT_SECONDS)
                assert not thread.is_alive()

    return run


def write(
    producer: RecordProducer, plan: TopicPlan, *samples: SampleRolledOut, value: bytes | None = None
) -> None:
    producer.write(
        ProducerRecord(
            plan.topic("rollout.samples"),
            CODEC.encode(sample) if value is None else value,
            key=sample.prompt_group_id,
            partition=plan.partition(sample.prompt_group_id, sample.policy_version),
            headers={"policy-version": str(sample.policy_version)},
        )
        for sample in samples
    )


def read(connection: Connection, plan: TopicPlan, entity: str) -> list[Record]:
    reader = LogReader(connection)
    num_partitions = (
        plan.num_sample_partitions
        if entity in ("rollout.samples", "reference.logprobs", "prompt.end-requests")
        else 1
    )
    try:
        return reader.read_to_end(
            [(plan.topic(entity), partition) for partition in range(num_partitions)]
        )
    finally:
        reader.close()


def committed(admin: Admin, plan: TopicPlan) -> dict[tuple[str, int], int]:
    topic_partitions = [
        (plan.topic("rollout.samples"), partition)
        for partition in range(plan.num_sample_partitions)
    ]
    return admin.committed_offsets(plan.consumer_group("reference"), topic_partitions)


def announce(
    producer: RecordProducer, plan: TopicPlan, version: int, *, start_offset: int = 0
) -> None:
    starts = [
        TopicOffset(plan.topic("rollout.samples"), partition, start_offset)
        for partition in plan.partitions_of_version(version)
    ]
    producer.write(
        [
            ProducerRecord(
                plan.topic("control.policy-versions"),
                CODEC.encode(published(version, start_offsets=starts)),
            )
        ]
    )


def test_role_answers_every_sample_in_its_partition_and_commits(
    role: Callable[[], AbstractContextManager[Worker]],
    plan: TopicPlan,
    producer: RecordProducer,
    connection: Connection,
    admin: Admin,
) -> None:
    samples = [
        rolled_out("000000-0000-0", 0),
        rolled_out("000000-0000-0", 1),
        rolled_out("000001-0000-0", 0, version=1),
    ]
    write(producer, plan, *samples)
    with role():
        turn_until(lambda: len(read(connection, plan, "reference.logprobs")) == 3)
        turn_until(lambda: sum(committed(admin, plan).values()) == 3)
    answers = [
        event
        for record in read(connection, plan, "reference.logprobs")
        for event in split_samples(CODEC.decode(record.value))
    ]
    assert {answer.sample_id for answer in answers if isinstance(answer, SampleEvaluated)} == {
        sample.sample_id for sample in samples
    }
    assert {record.partition for record in read(connection, plan, "reference.logprobs")} == {0, 1}


def test_role_waits_for_an_unavailable_object_store_and_loses_no_sample(
    config: RunConfig,
    plan: TopicPlan,
    producer: RecordProducer,
    connection: Connection,
    tmp_path: Path,
) -> None:
    folder, elsewhere = tmp_path / "objects", tmp_path / "unmounted"
    store = ObjectStore.open(folder.as_uri())
    whole = rolled_out("000000-0000-0", 0)
    write(
        producer,
        plan,
        dataclasses.replace(whole, tokens=store_array(np.asarray(whole.tokens), store)),
    )
    folder.rename(elsewhere)
    with Worker(
        "reference", config, claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6)
    ) as worker:

        def handle(samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
            (sample,) = samples
            assert np.asarray(sample.tokens).tolist() == np.asarray(whole.tokens).tolist()
            answer = evaluated(sample.prompt_group_id)
            return [
                worker.records.build_for_sample(
                    "reference.logprobs",
                    answer,
                    prompt_group_id=sample.prompt_group_id,
                    policy_version=0,
                )
            ]

        def run() -> None:
            worker.lifecycle.wait_for_stores(outages, deadline_seconds=3600)
            SampleLoop(worker, handle).run()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            turn_until(
                lambda: worker.lifecycle.readiness_problem() == "the object store does not answer"
            )
            turn_until(lambda: len(read(connection, plan, "control.heartbeats.reference")) >= 3)
            assert worker.lifecycle.liveness_problem() == ""
            elsewhere.rename(folder)
            turn_until(lambda: len(read(connection, plan, "reference.logprobs")) == 1)
        finally:
            worker.drain.start()
            thread.join(TIMEOUT_SECONDS)
    assert read(connection, plan, "reference.dead-letters") == []
    assert read(connection, plan, "prompt.end-requests") == []


def test_role_dead_letters_poison_samples_and_continues(
    role: Callable[[], AbstractContextManager[Worker]],
    plan: TopicPlan,
    producer: RecordProducer,
    connection: Connection,
) -> None:
    write(producer, plan, rolled_out(rollout_logprobs=np.full(4, np.nan, np.float32)))
    write(producer, plan, rolled_out(index=1), value=b"garbage")
    write(producer, plan, rolled_out("000000-0001-0"))
    with role():
        turn_until(lambda: len(read(connection, plan, "reference.logprobs")) == 1)
        turn_until(lambda: len(read(connection, plan, "reference.dead-letters")) == 2)
        turn_until(lambda: len(read(connection, plan, "prompt.end-requests")) == 2)
    assert [
        dead_letter.headers["error-class"]
        for dead_letter in read(connection, plan, "reference.dead-letters")
    ] == ["PoisonSample", "CorruptRecord"]
    ends = [CODEC.decode(record.value) for record in read(connection, plan, "prompt.end-requests")]
    asked = [
        (end.prompt_group_id, end.outcome.value, end.reason.partition(": ")[0])
        for end in ends
        if isinstance(end, PromptGroupEnded)
    ]
    assert asked == [("000000-0000-0", "failed", "reference")] * 2, (
        "no role would wait for our output for ever"
    )


def test_expired_samples_are_passed_over_without_being_decoded(
    role: Callable[[], AbstractContextManager[Worker]],
    plan: TopicPlan,
    producer: RecordProducer,
    connection: Connection,
) -> None:
    """Garbage of a version that left the window is not even a dead letter."""
    for version in range(3):
        announce(producer, plan, version)
    write(producer, plan, rolled_out(version=0), value=b"garbage")
    write(
        producer,
        plan,
        rolled_out("000001-0000-0", version=1),
        rolled_out("000002-0000-0", version=2),
    )
    with role() as worker:
        turn_until(lambda: len(read(connection, plan, "reference.logprobs")) == 2)
        turn_until(
            lambda: b'relax_records_expired_total{role="reference"} 1.0' in worker.metrics.render()
        )
    assert read(connection, plan, "reference.dead-letters") == []


def test_published_version_seeks_the_consumer_past_stale_records_of_its_slot(
    role: Callable[[], AbstractContextManager[Worker]],
    plan: TopicPlan,
    producer: RecordProducer,
    connection: Connection,
    admin: Admin,
) -> None:
    """Version 3 reuses the slot of version 0; ten records of version 0 precede its own."""
    announce(producer, plan, 0)
    write(producer, plan, *(rolled_out(f"000000-{index:04d}-0", version=0) for index in range(10)))
    for version in (1, 2):
        announce(producer, plan, version)
    announce(producer, plan, 3, start_offset=10)
    write(producer, plan, rolled_out("000003-0000-0", version=3))
    with role() as worker:
        turn_until(lambda: len(read(connection, plan, "reference.logprobs")) == 1)
        turn_until(
            lambda: b'relax_records_expired_total{role="reference"} 10.0' in worker.metrics.render()
        )
        turn_until(lambda: committed(admin, plan).get((plan.topic("rollout.samples"), 0)) == 11)
