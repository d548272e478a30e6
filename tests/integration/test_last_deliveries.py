"""A prompt group at its delivery limit fails only when no rollout worker holds it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import issued

from relax_events.config import RunConfig
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event, PromptGroupEnded, SampleRolledOut
from relax_events.kafka.connection import Connection
from relax_events.kafka.leases import Lease
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.roles.prompt_intake import MAX_DELIVERIES
from relax_events.roles.worker_factory import open_worker
from relax_events.topics import TopicPlan
from relax_events.weights.transport import NullWeightsReader
from tests.unit.image_model import build_image_model, image_engine
from workers.rollout import RolloutLoop

CODEC, GROUP = EventCodec(), "000000-0000-0"


class Gated:
    """An engine that samples no token until the gate opens."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine, self.gate, self.is_busy = engine, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def poll(self, *, timeout_seconds: float) -> list[object]:
        self.is_busy.set()
        return (
            list(self._engine.poll(timeout_seconds=0.0)) if self.gate.wait(timeout_seconds) else []
        )


class Log:
    """What the rollout workers wrote."""

    def __init__(self, connection: Connection, plan: TopicPlan) -> None:
        topics = {plan.topic("rollout.samples"), plan.topic(plan.end_requests("rollout"))}
        topic_partitions = [
            (spec.name, partition)
            for spec in plan.specs()
            if spec.name in topics
            for partition in range(spec.num_partitions)
        ]
        assert {topic for topic, _ in topic_partitions} == topics
        self._reader = LogReader(connection, start=dict.fromkeys(topic_partitions, 0))
        self._events: list[Event] = []

    def of(self, kind: type[Event]) -> list[Any]:
        self._events += [
            event
            for record in self._reader.fetch(timeout_seconds=0.1)
            for event in split_samples(CODEC.decode(record.value))
        ]
        return [event for event in self._events if isinstance(event, kind)]


@pytest.fixture
def config(apply_run: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    engine = {"max_context_tokens": 256, "sampling": {"max_new_tokens": 4}}
    model, workers = {"path": build_image_model(), "device": "cpu"}, {"heartbeat_seconds": 1.0}
    return apply_run(
        run={"directory": tmp_path, "samples_per_prompt": 2},
        model=model,
        data={"source": "synthetic_images:colour"},
        engine=engine,
        workers=workers,
    )


@pytest.fixture
def log(connection: Connection, config: RunConfig) -> Log:
    return Log(connection, TopicPlan.from_config(config))


@contextmanager
def at_work(config: RunConfig, engine: object, *, index: int) -> Iterator[RolloutLoop]:
    with open_worker("rollout", config, index=index) as worker:
        loop = RolloutLoop(worker, engine, NullWeightsReader())  # type: ignore[arg-type]
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield loop
        finally:
            worker.drain.start()
            thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


@contextmanager
def generating(
    config: RunConfig, producer: RecordProducer, *, settle: Callable[[bool], None]
) -> Iterator[tuple[Gated, RolloutLoop]]:
    """Yield two workers: one that generates the prompt group, and another that receives the same
    record at its last delivery."""
    first = Gated(image_engine())
    with at_work(config, first, index=0) as holder:
        producer.write(
            [
                ProducerRecord(
                    TopicPlan.from_config(config).topic("prompt.groups"),
                    CODEC.encode(issued(GROUP)),
                    key=GROUP,
                )
            ]
        )
        assert first.is_busy.wait(TIMEOUT_SECONDS)
        record = holder._running[GROUP].leases[0].record
        with at_work(config, image_engine(), index=1) as other:
            other._put(Lease(record, MAX_DELIVERIES, settle))
            yield first, other


def test_last_delivery_leaves_the_prompt_group_to_the_worker_generating_it(
    config: RunConfig, producer: RecordProducer, log: Log
) -> None:
    settled: list[bool] = []
    with generating(config, producer, settle=settled.append) as (first, other):
        claims = other._redelivery_guard._held
        turn_until(lambda: bool(claims) and "rollout-0" in claims[GROUP].claimed_at)
        assert (settled, log.of(PromptGroupEnded)) == ([], [])
        first.gate.set()
        turn_until(lambda: settled == [True])
        turn_until(lambda: len(log.of(SampleRolledOut)) == 2)
    assert log.of(PromptGroupEnded) == []


def test_prompt_group_held_by_no_worker_fails_at_its_last_delivery(
    config: RunConfig, log: Log
) -> None:
    settled: list[bool] = []
    record = Record(
        TopicPlan.from_config(config).topic("prompt.groups"),
        0,
        0,
        GROUP,
        CODEC.encode(issued(GROUP)),
        {},
        0,
    )
    with at_work(config, Gated(image_engine()), index=1) as other:
        other._put(Lease(record, MAX_DELIVERIES, settled.append))
        turn_until(lambda: settled == [True])
        turn_until(lambda: len(log.of(PromptGroupEnded)) == 1)
    (end,) = log.of(PromptGroupEnded)
    assert (end.prompt_group_id, end.outcome) == (GROUP, Outcome.FAILED)
    assert end.reason == "failed at delivery 8: the workers that leased it crashed or were stopped"


def test_leaving_worker_releases_its_leases_at_their_last_delivery(
    config: RunConfig, producer: RecordProducer, log: Log
) -> None:
    settled: list[bool] = []
    with generating(config, producer, settle=settled.append) as (first, other):
        turn_until(lambda: bool(other._redelivery_guard._held))
    assert (settled, log.of(PromptGroupEnded)) == ([False], [])
    del first
