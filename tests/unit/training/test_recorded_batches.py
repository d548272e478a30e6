"""Recorded batches are prefetched within a bound of bytes, and decoded one step at a time."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_samples import committed, ready

from relax_events.events.types import SampleReady, TrainStepCommitted
from relax_events.kafka.records import Record
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.ranks import SingleRank
from relax_events.training.replay import recorded_batches
from relax_events.training.replay.recorded_batches import RecordedBatch, RecordedBatches

RECORD_BYTES = 100


def step(number: int) -> TrainStepCommitted:
    """Return a step of two samples at offsets of their own."""
    return committed(
        number,
        sample_ids=[f"{number:06d}-0000-0/{index}" for index in range(2)],
        partitions=np.zeros(2, np.int32),
        offsets=np.array([2 * number, 2 * number + 1], np.int64),
        ranks=np.zeros(2, np.int32),
        micro_batches=np.zeros(2, np.int32),
    )


class Log:
    """Returns records, and counts those of each read."""

    def __init__(self) -> None:
        self.num_read: list[int] = []

    def read_at(
        self, topic: str, locations: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Record]:
        self.num_read.append(len(locations))
        return {
            location: Record(topic, *location, "", bytes(RECORD_BYTES), {}, 0)
            for location in locations
        }


@pytest.mark.parametrize(
    ("max_bytes", "num_read"), [(0, [2] * 10), (6 * RECORD_BYTES, [2, 6, 6, 6]), (1 << 30, [2, 18])]
)
def test_recorded_steps_are_read_within_a_byte_limit_and_decoded_lazily(
    max_bytes: int, num_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_batches, "MAX_BYTES_AT_ONCE", max_bytes)
    decoded: list[int] = []

    def decode(record: Record) -> list[SampleReady]:
        decoded.append(record.offset)
        return [ready(f"{record.offset // 2:06d}-0000-0", record.offset % 2)]

    worker: Any = SimpleNamespace(
        plan=SimpleNamespace(partitions_per_version=1, topic=lambda entity: entity), records=None
    )
    log: Any = Log()
    batches = RecordedBatches(worker, SingleRank(), decode=decode).read(
        log, [step(number) for number in range(10)]
    )
    for number in range(10):
        batch = next(batches)
        assert batch.step.train_step == number
        assert [placed.sample.key.sample_index for placed in batch.samples] == [0, 1]
        assert len(decoded) == 2 * (number + 1), "a step was decoded before it was asked for"
    assert next(batches, None) is None
    assert log.num_read == num_read


@pytest.mark.parametrize(
    ("groups", "micro_batches", "lengths"),
    [
        ("aabbcc", [0, 0, 0, 0, 0, 0], [6]),
        ("aabbcc", [0, 0, 1, 1, 2, 2], [2, 2, 2]),
        ("aabbcc", [0, 0, 0, 1, 1, 2], [6]),  # no boundary lies between two prompt groups
        ("aabbcc", [0, 0, 0, 1, 2, 2], [4, 2]),
    ],
)
def test_parts_of_a_recorded_step_end_with_its_micro_batches_and_prompt_groups(
    groups: str, micro_batches: list[int], lengths: list[int]
) -> None:
    samples = [
        LocatedSample(ready(f"000000-{ord(name):04d}-0", index % 2), 0, index)
        for index, name in enumerate(groups)
    ]
    batch = RecordedBatch(step(0), samples, micro_batches, max(micro_batches) + 1)
    parts = list(batch.parts())
    assert [len(part) for part in parts] == lengths
    assert [one for part in parts for one in part] == samples
