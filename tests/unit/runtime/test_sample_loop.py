"""The sample loop works in batches: each is processed, flushed and committed before the next is
fetched. Worker and consumer are fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_samples import rolled_out

from relax_events.deadline import Deadline
from relax_events.errors import PoisonSample
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime import processors, sample_input
from relax_events.runtime.drain import Drain
from relax_events.runtime.processors import SampleLoop
from relax_events.telemetry.traces import Traces

pytestmark = pytest.mark.unit
SAMPLES = "rollout.samples"


class Stage:
    """A role with the records that wait for it; `did` lists what it did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
        self.waiting: list[Record] = []
        self.did: list[Any] = []
        self.lengths: dict[bytes, int] = {}
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
        self.drain, self.num_ticks, self.poison_length = Drain(seconds=60), 0, -1
        self.worker: Any = SimpleNamespace(
            role="reference",
            connection=None,
            plan=SimpleNamespace(topic=lambda entity: entity, consumer_group=lambda role: role),
            config=SimpleNamespace(run=SimpleNamespace(max_staleness=0)),
            drain=self.drain,
            metrics=SimpleNamespace(
                count_expired=lambda count: self.did.append(f"{count} expired")
            ),
            heartbeat=SimpleNamespace(set_in_flight=lambda _: None),
            control=SimpleNamespace(
                policy_version=0,
                is_paused=False,
                is_expired=lambda version: version is not None and version < 0,
                wait_until_published=lambda _: None,
                follow=lambda *_: None,
            ),
            records=SimpleNamespace(
                producer=SimpleNamespace(
                    send=lambda record: None, flush=lambda: self.did.append("flush")
                ),
                decode_samples=self._samples,
                dead_letter=lambda record, _: self.did.append(f"dead letter {record.offset}"),
                build_end_request=lambda key, *_: key,
                traces=Traces(),
            ),
            lifecycle=SimpleNamespace(
                record_processed=lambda *_: None,
                record_progress=lambda: None,
                tick=self._tick,
                track_lag=lambda _: None,
            ),
        )
        self.loop = SampleLoop(self.worker, self._handle, **limits)

    def run(self, *, num_turns: int) -> list[Any]:
        """Let the loop take so many turns, and return what it did."""
        self.did.clear()
        self.num_ticks = num_turns
        self.drain._is_requested = False
        self.loop.run()
        return list(self.did)

    def write(self, *num_tokens: int, partition: int = 0, version: int = 0) -> None:
        """Write a record for each sample."""
        for length in num_tokens:
            self.write_record(length, partition=partition, version=version)

    def write_record(self, *num_tokens: int, partition: int = 0, version: int = 0) -> None:
        """Write a record of samples of these lengths."""
        offset = sum(record.partition == partition for record in self.waiting)
        value = " ".join(map(str, num_tokens)).encode()
        headers = {"policy-version": str(version)}
        self.waiting.append(Record(SAMPLES, partition, offset, "key", value, headers, 0))

    def _samples(self, record: Record) -> list[SampleRolledOut]:
        """Return samples of the lengths in a record's value."""
        return [
            self._sample(record, int(length), number)
            for number, length in enumerate((record.value or b"").split())
        ]

    def _sample(self, record: Record, length: int, number: int) -> SampleRolledOut:
        tokens = np.ones(length, np.int32)
        mask, logprobs = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32)
        return rolled_out(
            f"{record.partition:06d}-0000-0",
            record.offset + number,
            of=99,
            tokens=tokens,
            loss_mask=mask,
            rollout_logprobs=logprobs,
            num_prompt_tokens=1,
        )

    def _handle(self, samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
        if any(len(sample.tokens) == self.poison_length for sample in samples):
            raise PoisonSample("as the test wants it")
        self.did.append(
            [f"{int(sample.prompt_group_id[:6])}@{sample.key.sample_index}" for sample in samples]
        )
        return []

    def _tick(self, *, working: bool) -> None:
        self.num_ticks -= 1
        if not self.num_ticks:
            self.drain.start()

    def _fetch(self, max_records: int, *, timeout_seconds: float) -> list[Record]:
        self.did.append("poll")
        if self.is_paused:
            return []
        found, self.waiting = self.waiting[:max_records], self.waiting[max_records:]
        return found

    def _commit(self, offsets: list[TopicOffset], *, wait: Deadline | None = None) -> None:
        self.did.append({offset.partition: offset.offset for offset in offsets})


def test_each_batch_is_committed_and_the_consumer_polled_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, max_tokens=10)
    stage.write(6, 6, 3, 99, 4)
    assert stage.run(num_turns=3) == [
        "poll", ["0@0", "0@1"], "flush", {0: 2},
        "poll", ["0@2", "0@3"], "flush", {0: 4},
        "poll", ["0@4"], "flush", {0: 5},
    ]  # fmt: skip


def test_batch_is_limited_by_record_count_without_a_token_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "PART_SECONDS", 0.0)
    stage = Stage(monkeypatch, min_part_samples=2)
    stage.write(5, 5, 5)
    assert stage.run(num_turns=2)[1::4] == [["0@0", "0@1"], ["0@2"]]


def test_batches_of_fast_records_grow_to_all_that_were_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "PART_SECONDS", 3600.0)
    stage = Stage(monkeypatch, min_part_samples=2)
    stage.write(5, 5, 5, 5, 5)
    assert stage.run(num_turns=2)[1::4] == [["0@0", "0@1"], ["0@2", "0@3", "0@4"]]


def test_partition_with_the_oldest_version_is_processed_first_in_offset_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, max_tokens=10)
    stage.write(5, 5, partition=1, version=7)
    stage.write(5, 5, partition=0, version=3)
    stage.write(5, partition=0, version=2)  # written late
    assert [did for did in stage.run(num_turns=3) if isinstance(did, list)] == [
        ["0@0", "0@1"],
        ["0@2", "1@0"],
        ["1@1"],
    ]


def test_drain_finishes_one_batch_and_leaves_the_rest_uncommitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, max_tokens=10)
    stage.write(*[10] * 50)
    assert stage.run(num_turns=1) == ["poll", ["0@0"], "flush", {0: 1}]


def test_paused_worker_polls_and_processes_nothing_until_it_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, max_tokens=10)
    stage.write(10, 10)
    stage.run(num_turns=1)
    stage.worker.control.is_paused = True
    assert stage.run(num_turns=4) == ["poll"] * 4
    assert stage.is_paused
    stage.worker.control.is_paused = False
    assert stage.run(num_turns=1) == ["poll", ["0@1"], "flush", {0: 2}]
    assert not stage.is_paused


def test_fetched_records_of_a_revoked_partition_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, max_tokens=10)
    stage.write(10, 10)
    stage.write(10, partition=1, version=1)
    stage.run(num_turns=1)
    stage.loop._input._revoke([TopicOffset(SAMPLES, 0, 2)], Deadline(1.0))
    assert stage.run(num_turns=1) == ["poll", ["1@0"], "flush", {1: 1}]


def test_expired_records_are_committed_without_being_processed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch)
    stage.write(5, version=-1)
    assert stage.run(num_turns=1) == ["poll", "1 expired", "flush", {0: 1}]


def test_part_is_limited_by_samples_and_committed_by_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "PART_SECONDS", 0.0)
    stage = Stage(monkeypatch, min_part_samples=2)
    stage.write_record(5, 5, 5)
    stage.write_record(5, 5)
    assert stage.run(num_turns=2) == [
        "poll", ["0@0", "0@1", "0@2"], "flush", {0: 1},
        "poll", ["0@1", "0@2"], "flush", {0: 2},
    ]  # fmt: skip


def test_poison_sample_rejects_its_record_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.write_record(5, 9)
    stage.write_record(5, 5)
    stage.poison_length = 9
    assert stage.run(num_turns=1) == [
        "poll", "dead letter 0", ["0@1", "0@2"], "flush", {0: 2},
    ]  # fmt: skip
