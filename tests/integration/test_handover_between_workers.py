"""A rollout worker that drains in the middle of a prompt group stores its tokens, and the next
worker continues with them; prompt groups of trained steps are ended instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import issued, published

from relax_events.config import RunConfig
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import PromptGroupEnded, SampleRolledOut
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.objects import ObjectStore
from relax_events.roles.handover import PREFIX
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.topics import TopicPlan
from relax_events.weights import Weights
from relax_events.weights.transport import NullWeightsReader
from tests.unit.image_model import build_image_model, image_engine
from workers.rollout import RolloutLoop

CODEC, GROUP = EventCodec(), "000000-0000-0"
NUM_BEFORE = 12


class Reluctant:
    """An engine that stops after some tokens, like one with long samples."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def poll(self, *, timeout_seconds: float) -> list[object]:
        if self._engine.num_tokens >= NUM_BEFORE:
            threading.Event().wait(timeout_seconds)
            return []
        return list(self._engine.poll(timeout_seconds=0.0))


class Holding(Reluctant):
    """Stops after some tokens until it has loaded a version, whose tensors it leaves out."""

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__(engine)
        self.policy_version = 0
        self.tokens_at_load: list[int] = []

    def load_weights(self, weights: Weights, **_: object) -> None:
        self.policy_version = weights.policy_version
        self.tokens_at_load.append(self._engine.num_tokens)

    def poll(self, *, timeout_seconds: float) -> list[object]:
        if self.policy_version:
            return list(self._engine.poll(timeout_seconds=0.0))
        return super().poll(timeout_seconds=timeout_seconds)


def work(config: RunConfig, engine: object, until: Callable[[], bool]) -> None:
    """Let a rollout worker work until this holds, and drain it."""
    with open_worker("rollout", config, index=0) as worker:
        loop = RolloutLoop(worker, engine, NullWeightsReader())  # type: ignore[arg-type]
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            turn_until(until)
        finally:
            worker.drain.start()
            thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def test_leaving_worker_hands_over_partial_samples_to_the_next_worker(
    apply_run: Callable[..., RunConfig],
    connection: Connection,
    producer: RecordProducer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = {"max_context_tokens": 256, "sampling": {"max_new_tokens": 24}}
    model, workers = {"path": build_image_model(), "device": "cpu"}, {"drain_seconds": 0.5}
    config = apply_run(
        run={"directory": tmp_path, "samples_per_prompt": 2},
        model=model,
        data={"source": "synthetic_images:colour"},
        engine=engine,
        workers=workers,
    )
    plan, store = TopicPlan.from_config(config), open_store(config)
    producer.write(
        [ProducerRecord(plan.topic("prompt.groups"), CODEC.encode(issued(GROUP)), key=GROUP)]
    )
    first, second = image_engine(), image_engine()

    work(config, Reluctant(first), lambda: first.num_tokens >= NUM_BEFORE)
    assert kept(store) == [f"{PREFIX}{GROUP}"]
    num_before = first.num_tokens

    topic_partitions = [
        (plan.topic("rollout.samples"), partition)
        for partition in range(plan.num_sample_partitions)
    ]
    reader, written = (
        LogReader(connection, start=dict.fromkeys(topic_partitions, 0)),
        list[SampleRolledOut](),
    )

    def is_written() -> bool:
        events = (
            event
            for record in reader.fetch(timeout_seconds=0.1)
            for event in split_samples(CODEC.decode(record.value))
        )
        written.extend(event for event in events if isinstance(event, SampleRolledOut))
        return len(written) == 2 and not kept(store)

    work(config, second, is_written)
    reader.close()
    num_tokens = sum(len(sample.tokens) - sample.num_prompt_tokens for sample in written)
    assert (second.usage.num_recomputed, second.num_tokens) == (num_before, num_tokens - num_before)


def test_prompt_groups_of_a_trained_step_leave_the_engine_to_the_next_step(
    apply_run: Callable[..., RunConfig],
    connection: Connection,
    producer: RecordProducer,
    tmp_path: Path,
) -> None:
    config = apply_run(
        run={"directory": tmp_path, "samples_per_prompt": 2, "max_staleness": 0, "num_steps": 2},
        model={"path": build_image_model(), "device": "cpu"},
        data={"source": "synthetic_images:colour"},
        engine={
            "max_context_tokens": 256,
            "max_running_samples": 2,
            "max_prompt_groups": 2,
            "sampling": {"max_new_tokens": 24},
        },
    )
    plan = TopicPlan.from_config(config)
    running, waiting, following = GROUP, "000000-0001-0", "000001-0000-0"

    def issue(*names: str, version: int) -> None:
        topic = plan.topic("prompt.groups")
        groups = [replace(issued(name), required_policy_version=version) for name in names]
        producer.write(
            ProducerRecord(topic, CODEC.encode(group), key=group.prompt_group_id, partition=0)
            for group in groups
        )

    def publish(version: int) -> None:
        topic = plan.topic("control.policy-versions")
        producer.write([ProducerRecord(topic, CODEC.encode(published(version)))])

    issue(running, waiting, version=0)
    publish(0)
    engine = Holding(image_engine())
    entities = ("rollout.samples", "prompt.end-requests")
    topic_partitions = [
        (plan.topic(entity), at) for entity in entities for at in range(plan.num_sample_partitions)
    ]
    reader = LogReader(connection, start=dict.fromkeys(topic_partitions, 0))
    events: list[SampleRolledOut | PromptGroupEnded] = []
    is_published = False

    def is_generated() -> bool:
        nonlocal is_published
        if not is_published and engine.num_tokens >= NUM_BEFORE:
            publish(1)
            issue(following, version=1)
            is_published = True
        for record in reader.fetch(timeout_seconds=0.1):
            for event in split_samples(CODEC.decode(record.value)):
                assert isinstance(event, SampleRolledOut | PromptGroupEnded)
                events.append(event)
        return len(events) >= 4

    work(config, engine, is_generated)
    reader.close()
    ended = {
        event.prompt_group_id: event for event in events if isinstance(event, PromptGroupEnded)
    }
    assert ended.keys() == {running, waiting}
    assert {(event.outcome, event.reason) for event in ended.values()} == {
        (Outcome.EXPIRED, "its step was trained before version 1")
    }
    samples = [event for event in events if isinstance(event, SampleRolledOut)]
    assert {event.prompt_group_id for event in samples} == {following}
    assert engine.tokens_at_load == [NUM_BEFORE], "nothing was generated to its end"


def kept(store: ObjectStore) -> list[str]:
    return store.list(PREFIX)
