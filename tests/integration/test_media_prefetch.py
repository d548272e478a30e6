"""An engine continues while a prompt group's media are fetched, and unavailable media fail only
their own prompt group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from broker_steps import TIMEOUT_SECONDS
from event_samples import issued

from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import MediaRef, Outcome
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import PromptGroupEnded, PromptGroupIssued, SampleRolledOut
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.roles.worker_factory import open_worker
from relax_events.topics import TopicPlan
from relax_events.weights.transport import NullWeightsReader
from tests.unit.image_model import build_image_model, image_engine, image_item, question
from workers.rollout import RolloutLoop

CODEC = EventCodec()
WITH_IMAGE, PLAIN = "000000-0000-0", "000000-0001-0"


class SlowLibrary(MediaLibrary):
    """Brings nothing before the test allows it."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.may_bring = threading.Event()

    def require(self, references: Iterable[MediaRef]) -> None:
        assert self.may_bring.wait(TIMEOUT_SECONDS)
        super().prefetch(references)


class Session:
    """A rollout worker in a thread of this process whose engine reads images, and what it
    wrote."""

    def __init__(
        self,
        config: RunConfig,
        connection: Connection,
        producer: RecordProducer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.config, self.plan, self._producer = config, TopicPlan.from_config(config), producer
        self.library = SlowLibrary(config)
        monkeypatch.setattr(
            "workers.rollout.MediaLibrary", lambda _: self.library
        )  # the one that runs ahead
        self._stack = ExitStack()
        self.worker = self._stack.enter_context(open_worker("rollout", config, index=0))
        loop = RolloutLoop(
            self.worker, image_engine(), NullWeightsReader(), library=MediaLibrary(config)
        )
        self._thread = threading.Thread(target=loop.run)
        entities = ("rollout.samples", "prompt.end-requests")
        topic_partitions = [
            (self.plan.topic(entity), partition)
            for entity in entities
            for partition in range(self.plan.num_sample_partitions)
        ]
        self._reader = LogReader(connection, start=dict.fromkeys(topic_partitions, 0))

    def __enter__(self) -> Session:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.library.may_bring.set()
        self.worker.drain.start()
        self._thread.join(TIMEOUT_SECONDS)
        self._reader.close()
        self._stack.close()
        assert not self._thread.is_alive()

    def issue(self, *groups: PromptGroupIssued) -> None:
        topic = self.plan.topic("prompt.groups")
        self._producer.write(
            [
                ProducerRecord(topic, CODEC.encode(group), key=group.prompt_group_id)
                for group in groups
            ]
        )

    def written(self, *, count: int) -> list[SampleRolledOut | PromptGroupEnded]:
        """Wait for so many events, and return them."""
        found: list[SampleRolledOut | PromptGroupEnded] = []
        for _ in range(int(TIMEOUT_SECONDS / 0.2)):
            events = [
                event
                for record in self._reader.fetch(timeout_seconds=0.2)
                for event in split_samples(CODEC.decode(record.value))
            ]
            found += [
                event for event in events if isinstance(event, SampleRolledOut | PromptGroupEnded)
            ]
            if len(found) >= count:
                break
        return found


@pytest.fixture
def session(
    apply_run: Callable[..., RunConfig],
    connection: Connection,
    producer: RecordProducer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Session:
    model = {"path": build_image_model(), "device": "cpu"}
    config = apply_run(
        run={"directory": tmp_path, "samples_per_prompt": 2},
        model=model,
        data={"source": "synthetic_images:colour"},
        engine={"max_context_tokens": 256},
    )
    return Session(config, connection, producer, monkeypatch)


def about_an_image(session: Session) -> PromptGroupIssued:
    """Issue a prompt group about an image in the store that is not yet on the worker's machine."""
    elsewhere = session.config.model_copy(
        update={
            "run": session.config.run.model_copy(update={"directory": Path("elsewhere").absolute()})
        }
    )
    reference = MediaLibrary(elsewhere, store=ObjectStore.open(session.config.objects_uri)).add(
        image_item(64, 48)
    )
    return replace(issued(WITH_IMAGE), messages=question(reference))


def groups_of(events: Iterable[SampleRolledOut | PromptGroupEnded]) -> list[str]:
    return sorted({event.prompt_group_id for event in events})


def test_engine_continues_while_an_image_is_being_fetched(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with session:
        session.issue(about_an_image(session), issued(PLAIN))
        assert groups_of(session.written(count=2)) == [PLAIN]
        session.library.may_bring.set()
        events = session.written(count=2)
        assert groups_of(events) == [WITH_IMAGE]
        assert all(isinstance(event, SampleRolledOut) for event in events)


def test_missing_image_fails_only_its_prompt_group(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with session:
        group = about_an_image(session)
        (reference,) = (part.media for part in group.messages[0].parts if part.media is not None)
        ObjectStore.open(session.config.objects_uri).delete(
            [reference.uri.removeprefix(session.config.objects_uri).lstrip("/")]
        )
        session.library.may_bring.set()
        session.issue(group, issued(PLAIN))
        events = session.written(count=3)
        (ended,) = (event for event in events if isinstance(event, PromptGroupEnded))
        assert (ended.prompt_group_id, ended.outcome) == (WITH_IMAGE, Outcome.FAILED)
        assert reference.uri in ended.reason
        assert groups_of(event for event in events if isinstance(event, SampleRolledOut)) == [PLAIN]
