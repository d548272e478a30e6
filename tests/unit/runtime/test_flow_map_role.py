"""A map role that answers samples as they are done: what it commits meanwhile, and what it lets go.
Worker, consumer and work are stand-ins."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from event_samples import published, rolled_out

from relax_events.deadline import Deadline
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime import processors as map_role
from relax_events.runtime.concurrent_processor import Done, ConcurrentLoop, Key
from relax_events.runtime.drain import Drain
from relax_events.telemetry.traces import Traces

pytestmark = pytest.mark.unit
SAMPLES = "rollout.samples"
GROUP = "000000-0000-0"


class Stage:
    """A role with the records that wait for it, and what it began, sent and committed. `done` is
    what the work gives next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Record] = []
        self.begun: list[Key] = []
        self.done: list[Done] = []
        self.dropped: list[Key] = []
        self.said: list[str] = []
        self.committed: list[dict[int, int]] = []
        self.fetches: list[tuple[int, bool]] = []
        self.drain = Drain(seconds=60)
        self.capacity, self.progress = 2, 0
        self.at_work: set[Key] = set()
        self.is_paused = False
        consumer = SimpleNamespace(
            commit=self._commit,
            fetch=self._fetch,
            positions={},
            seek=lambda *_: None,
            close=lambda: None,
        )
        consumer.pause, consumer.resume = (
            (lambda: setattr(self, "is_paused", True)),
            (lambda: setattr(self, "is_paused", False)),
        )
        monkeypatch.setattr(map_role, "SubscribedConsumer", lambda *_, **__: consumer)
        self.metrics = SimpleNamespace(num_expired=0)
        self.metrics.expired = lambda count: setattr(
            self.metrics, "num_expired", self.metrics.num_expired + count
        )
        self.worker: Any = SimpleNamespace(
            role="judge",
            connection=None,
            paused=False,
            plan=SimpleNamespace(topic=lambda entity: entity, consumer_group=lambda role: role),
            config=SimpleNamespace(run=SimpleNamespace(max_staleness=0)),
            control=SimpleNamespace(policy_version=0),
            drain=self.drain,
            producer=SimpleNamespace(
                send=self.said.append, flush=lambda: self.said.append("flush")
            ),
            metrics=self.metrics,
            beats=SimpleNamespace(num_in_flight=0, advance_to=lambda _: None),
            is_expired=lambda version: (
                version is not None and version < self.worker.control.policy_version
            ),
            decode=lambda record: (
                None
                if record.value == b"garbage"
                else rolled_out(GROUP, record.offset, version=record.policy_version, of=9)
            ),
            await_published=lambda _: None,
            tombstone=lambda key, *_: f"end {key}",
            dead_letter=lambda record, _: None,
            finished=lambda count, _: self.said.append(f"finished {count}"),
            tick=lambda *, working: None,
            progressed=lambda: None,
            follow=lambda *_: None,
            traces=Traces(),
            reads=lambda _: None,
        )
        self.role = ConcurrentLoop(self.worker, self)

    @property
    def room(self) -> int:
        return self.capacity - len(self.at_work)

    def begin(self, key: Key, sample: SampleRolledOut) -> None:
        assert sample.key.sample_index == key[2]
        self.begun.append(key)
        self.at_work.add(key)

    def poll(self, *, timeout_seconds: float) -> list[Done]:
        done, self.done = self.done, []
        self.at_work -= {key for key, _ in done}
        return done

    def drop(self, keys: Collection[Key]) -> None:
        self.dropped += keys
        self.at_work -= set(keys)

    def _fetch(self, max_records: int, *, timeout_seconds: float) -> list[Record]:
        self.fetches.append((max_records, timeout_seconds > 0))
        if self.is_paused:
            return []
        found, self.waiting = self.waiting[:max_records], self.waiting[max_records:]
        return found

    def _commit(self, offsets: list[TopicOffset], *, wait: Deadline | None = None) -> None:
        self.said.append("commit")
        self.committed.append({offset.partition: offset.offset for offset in offsets})

    def write(
        self, *offsets: int, partition: int = 0, version: int = 0, value: bytes = b"sample"
    ) -> None:
        self.waiting += [
            Record(SAMPLES, partition, offset, GROUP, value, {"policy-version": str(version)}, 0)
            for offset in offsets
        ]

    def turn(self, *answered: int, partition: int = 0) -> None:
        """Take a turn in which the samples of these offsets come out done."""
        answers: list[Any] = [
            ((SAMPLES, partition, offset), [f"answer {offset}"]) for offset in answered
        ]
        self.done += answers
        self.role._turn(takes=not self.worker.control.is_paused)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_answers_go_out_as_they_are_done_and_offsets_wait_for_the_oldest(stage: Stage) -> None:
    stage.write(0, 1, 2)
    stage.turn()
    assert (stage.begun, stage.committed) == ([(SAMPLES, 0, 0), (SAMPLES, 0, 1)], [{0: 0}]), (
        "there is room for two"
    )
    stage.turn(1)
    assert stage.said[-2:] == ["answer 1", "finished 1"], "nothing to commit: the first is at work"
    stage.said.clear()
    stage.turn(0)
    assert stage.said == ["answer 0", "flush", "commit", "finished 1"], (
        "an answer is safe before its input is committed"
    )
    assert stage.committed[1:] == [{0: 2}]


def test_every_turn_polls_and_nobody_waits_for_records_while_there_is_work(stage: Stage) -> None:
    stage.write(0)
    stage.turn()
    stage.turn()
    assert stage.fetches == [(256, True), (256, False)]
    stage.capacity = 0
    stage.write(*range(1, 300))
    for _ in range(3):
        stage.turn()
    assert (len(stage.begun), len(stage.waiting)) == (1, 43), (
        "without room as much is held as may be, and no more"
    )
    assert (stage.is_paused, stage.fetches[-1]) == (True, (1, False)), "the membership is kept"
    stage.capacity = 2
    stage.turn()
    assert [offset for *_, offset in stage.begun] == [0, 1]


def test_paused_worker_polls_and_begins_nothing(stage: Stage) -> None:
    stage.write(0, 1, 2)
    stage.worker.control.is_paused = True
    for _ in range(3):
        stage.turn()
    assert (stage.begun, stage.is_paused, stage.fetches) == ([], True, [(256, True)] * 3)
    stage.worker.control.is_paused = False
    stage.turn()
    assert [offset for *_, offset in stage.begun] == [0, 1]


def test_what_can_t_be_used_holds_nothing_up(stage: Stage) -> None:
    stage.capacity = 9
    stage.worker.control.policy_version = 1
    stage.write(0, version=0)
    stage.write(1, version=1, value=b"garbage")
    stage.write(2, version=1)
    stage.turn()
    assert (stage.begun, stage.committed, stage.metrics.num_expired) == (
        [(SAMPLES, 0, 2)],
        [{0: 2}],
        1,
    )
    assert f"end {GROUP}" in stage.said


def test_work_on_what_leaves_the_window_is_given_up(stage: Stage) -> None:
    stage.write(0)
    stage.write(1, version=1)
    stage.turn()
    stage.worker.control.policy_version = 1
    stage.role._note_version(published(1))
    stage.turn()
    assert (stage.dropped, stage.metrics.num_expired) == ([(SAMPLES, 0, 0)], 1)
    stage.turn(0, 1)
    assert "answer 0" not in stage.said
    assert stage.committed[-1] == {0: 2}


def test_partition_that_goes_takes_its_work_along(stage: Stage) -> None:
    stage.capacity = 9
    stage.write(4, 5)
    stage.write(7, partition=1)
    stage.turn()
    stage.role._give_back([TopicOffset(SAMPLES, 0, 6)], Deadline(1.0))
    assert stage.dropped == [(SAMPLES, 0, 4), (SAMPLES, 0, 5)]
    stage.turn(4)
    assert "answer 4" not in stage.said
    stage.turn(7, partition=1)
    assert stage.committed == [{0: 4, 1: 7}, {0: 4, 1: 7}, {1: 8}]
    stage.write(4)
    stage.turn()
    stage.turn(4)
    assert stage.committed[3:] == [{0: 4}, {0: 5}], "a partition that comes back begins anew"


def test_drain_takes_nothing_new_and_finishes_what_is_at_work(stage: Stage) -> None:
    stage.write(0)
    stage.turn()
    stage.write(1)
    stage.drain.start()
    stage.done = [((SAMPLES, 0, 0), [ProducerRecord("reward.scores", b"score")])]
    stage.role.run()
    assert (stage.begun, stage.committed[-1]) == ([(SAMPLES, 0, 0)], {0: 1})
