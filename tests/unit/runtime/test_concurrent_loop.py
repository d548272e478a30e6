"""The concurrent loop writes samples as they finish: what it commits meanwhile, and what it
cancels. Worker, consumer and processor are fakes.
"""

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
from relax_events.runtime import sample_input
from relax_events.runtime.concurrent_processor import ConcurrentLoop, Done, Key
from relax_events.runtime.drain import Drain
from relax_events.telemetry.traces import Traces

pytestmark = pytest.mark.unit
SAMPLES = "rollout.samples"
GROUP = "000000-0000-0"


class Stage:
    """A role with its pending records, and what it submitted, sent and committed. `done` holds the
    next finished samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Record] = []
        self.submitted: list[Key] = []
        self.done: list[Done] = []
        self.cancelled: list[Key] = []
        self.sent: list[str] = []
        self.committed: list[dict[int, int]] = []
        self.fetches: list[tuple[int, bool]] = []
        self.drain = Drain(seconds=60)
        self.limit, self.progress = 2, 0
        self.in_flight: set[Key] = set()
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
        monkeypatch.setattr(sample_input, "SubscribedConsumer", lambda *_, **__: consumer)
        self.metrics = SimpleNamespace(num_expired=0)
        self.metrics.count_expired = lambda count: setattr(
            self.metrics, "num_expired", self.metrics.num_expired + count
        )
        self.worker: Any = SimpleNamespace(
            role="judge",
            connection=None,
            plan=SimpleNamespace(topic=lambda entity: entity, consumer_group=lambda role: role),
            config=SimpleNamespace(run=SimpleNamespace(max_staleness=0)),
            control=SimpleNamespace(
                policy_version=0,
                is_paused=False,
                follow=lambda *_: None,
                wait_until_published=lambda _: None,
                is_expired=lambda version: (
                    version is not None and version < self.worker.control.policy_version
                ),
            ),
            drain=self.drain,
            metrics=self.metrics,
            heartbeat=SimpleNamespace(set_in_flight=lambda _: None, advance_to=lambda _: None),
            records=SimpleNamespace(
                producer=SimpleNamespace(
                    send=self.sent.append, flush=lambda: self.sent.append("flush")
                ),
                decode_samples=self._decode,
                build_end_request=lambda key, *_: f"end {key}",
                dead_letter=lambda record, _: None,
                traces=Traces(),
            ),
            lifecycle=SimpleNamespace(
                record_processed=lambda count, _: self.sent.append(f"finished {count}"),
                tick=lambda *, working: None,
                record_progress=lambda: None,
                track_lag=lambda _: None,
            ),
        )
        self.loop = ConcurrentLoop(self.worker, self)

    @property
    def capacity(self) -> int:
        return self.limit - len(self.in_flight)

    def submit(self, key: Key, sample: SampleRolledOut) -> None:
        assert sample.key.sample_index == sum(key[2])
        self.submitted.append(key)
        self.in_flight.add(key)

    def poll(self, *, timeout_seconds: float) -> list[Done]:
        done, self.done = self.done, []
        self.in_flight -= {key for key, _ in done}
        return done

    def cancel(self, keys: Collection[Key]) -> None:
        self.cancelled += keys
        self.in_flight -= set(keys)

    def _decode(self, record: Record) -> list[SampleRolledOut]:
        """Return a record's samples, as many as its value has words."""
        words = (record.value or b"").split()
        return [
            rolled_out(GROUP, record.offset + number, version=record.policy_version or 0, of=9)
            for number, word in enumerate(words)
            if word != b"garbage"
        ]

    def _fetch(self, max_records: int, *, timeout_seconds: float) -> list[Record]:
        self.fetches.append((max_records, timeout_seconds > 0))
        if self.is_paused:
            return []
        found, self.waiting = self.waiting[:max_records], self.waiting[max_records:]
        return found

    def _commit(self, offsets: list[TopicOffset], *, wait: Deadline | None = None) -> None:
        self.sent.append("commit")
        self.committed.append({offset.partition: offset.offset for offset in offsets})

    def write(
        self, *offsets: int, partition: int = 0, version: int = 0, value: bytes = b"sample"
    ) -> None:
        self.waiting += [
            Record(SAMPLES, partition, offset, GROUP, value, {"policy-version": str(version)}, 0)
            for offset in offsets
        ]

    def step(self, *done_offsets: int, partition: int = 0) -> None:
        """Take a step in which the samples of these offsets are done."""
        done_samples: list[Any] = [
            ((SAMPLES, partition, (offset, 0)), [f"answer {offset}"]) for offset in done_offsets
        ]
        self.done += done_samples
        self.loop._step(takes=not self.worker.control.is_paused)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_outputs_are_sent_in_any_order_and_commits_wait_for_the_oldest_record(stage: Stage) -> None:
    stage.write(0, 1, 2)
    stage.step()
    assert (stage.submitted, stage.committed) == (
        [(SAMPLES, 0, (0, 0)), (SAMPLES, 0, (1, 0))],
        [{0: 0}],
    ), "there is room for two"
    stage.step(1)
    assert stage.sent[-2:] == ["answer 1", "finished 1"], "nothing to commit: the first is at work"
    stage.sent.clear()
    stage.step(0)
    assert stage.sent == ["answer 0", "flush", "commit", "finished 1"], (
        "an answer is safe before its input is committed"
    )
    assert stage.committed[1:] == [{0: 2}]


def test_every_step_polls_and_waits_for_records_only_when_idle(stage: Stage) -> None:
    stage.write(0)
    stage.step()
    stage.step()
    assert stage.fetches == [(256, True), (256, False)]
    stage.limit = 0
    stage.write(*range(1, 300))
    for _ in range(3):
        stage.step()
    assert (len(stage.submitted), len(stage.waiting)) == (1, 43), (
        "without room as much is held as may be, and no more"
    )
    assert (stage.is_paused, stage.fetches[-1]) == (True, (1, False)), "the membership is kept"
    stage.limit = 2
    stage.step()
    assert [offset for *_, (offset, _) in stage.submitted] == [0, 1]


def test_paused_worker_polls_and_submits_nothing(stage: Stage) -> None:
    stage.write(0, 1, 2)
    stage.worker.control.is_paused = True
    for _ in range(3):
        stage.step()
    assert (stage.submitted, stage.is_paused, stage.fetches) == ([], True, [(256, True)] * 3)
    stage.worker.control.is_paused = False
    stage.step()
    assert [offset for *_, (offset, _) in stage.submitted] == [0, 1]


def test_unusable_records_block_no_commit(stage: Stage) -> None:
    stage.limit = 9
    stage.worker.control.policy_version = 1
    stage.write(0, version=0)
    stage.write(1, version=1, value=b"garbage")
    stage.write(2, version=1)
    stage.step()
    assert (stage.submitted, stage.committed, stage.metrics.num_expired) == (
        [(SAMPLES, 0, (2, 0))],
        [{0: 2}],
        1,
    )
    assert f"end {GROUP}" in stage.sent


def test_samples_that_leave_the_window_are_cancelled(stage: Stage) -> None:
    stage.write(0)
    stage.write(1, version=1)
    stage.step()
    stage.worker.control.policy_version = 1
    stage.loop._input.apply_version(published(1))
    stage.step()
    assert (stage.cancelled, stage.metrics.num_expired) == ([(SAMPLES, 0, (0, 0))], 1)
    stage.step(0, 1)
    assert "answer 0" not in stage.sent
    assert stage.committed[-1] == {0: 2}


def test_samples_of_a_revoked_partition_are_cancelled(stage: Stage) -> None:
    stage.limit = 9
    stage.write(4, 5)
    stage.write(7, partition=1)
    stage.step()
    stage.loop._release([TopicOffset(SAMPLES, 0, (6, 0))], Deadline(1.0))
    assert stage.cancelled == [(SAMPLES, 0, (4, 0)), (SAMPLES, 0, (5, 0))]
    stage.step(4)
    assert "answer 4" not in stage.sent
    stage.step(7, partition=1)
    assert stage.committed == [{0: 4, 1: 7}, {0: 4, 1: 7}, {1: 8}]
    stage.write(4)
    stage.step()
    stage.step(4)
    assert stage.committed[3:] == [{0: 4}, {0: 5}], "a partition that comes back begins again"


def test_drain_accepts_no_new_records_and_finishes_samples_in_flight(stage: Stage) -> None:
    stage.write(0)
    stage.step()
    stage.write(1)
    stage.drain.start()
    stage.done = [((SAMPLES, 0, (0, 0)), [ProducerRecord("reward.scores", b"score")])]
    stage.loop.run()
    assert (stage.submitted, stage.committed[-1]) == ([(SAMPLES, 0, (0, 0))], {0: 1})


def test_samples_of_one_record_are_submitted_as_there_is_room_and_committed_together(
    stage: Stage,
) -> None:
    stage.write(0, value=b"one two three")
    stage.write(5)
    stage.step()
    assert [position for *_, position in stage.submitted] == [(0, 0), (0, 1)]
    stage.done = [((SAMPLES, 0, (0, 1)), ["answer 1"]), ((SAMPLES, 0, (0, 0)), ["answer 0"])]
    stage.step()
    assert stage.committed[-1] == {0: 0}, "the third has not been judged"
    stage.step()
    assert [position for *_, position in stage.submitted[2:]] == [(0, 2), (5, 0)]
    stage.done = [((SAMPLES, 0, (0, 2)), ["answer 2"])]
    stage.step()
    assert stage.committed[-1] == {0: 5}


def test_waiting_samples_of_a_revoked_partition_are_dropped(stage: Stage) -> None:
    stage.write(0, value=b"one two three")
    stage.step()
    stage.loop._release([TopicOffset(SAMPLES, 0, 1)], Deadline(1.0))
    assert [position for *_, position in stage.cancelled] == [(0, 0), (0, 1), (0, 2)]
    stage.step()
    assert len(stage.submitted) == 2
