"""What a record costs its readers: memory in proportion to its bytes."""

from __future__ import annotations

import tracemalloc

import pytest
from event_samples import committed, rolled_out

from relax_events.attacks.records import RecordAttack, amplifying_records
from relax_events.errors import CorruptRecord
from relax_events.events.codec import EventCodec
from relax_events.events.parts import VersionSegment
from relax_events.events.sample_columns import split_samples

MIB = 1024**2
ATTACKS = list(amplifying_records(3 * MIB))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_record_of_many_small_items_is_refused_before_it_fills_the_memory(
    attack: RecordAttack,
) -> None:
    codec = EventCodec()
    codec.learn(attack.schema_json)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord, match=r"more than \d+ values, which no events"):
            codec.decode(attack.record)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(attack.record)


def test_train_step_of_many_samples_is_read() -> None:
    ids = [f"{number:06}-0000-0/{number % 16}" for number in range(30_000)]
    codec = EventCodec()
    event = committed(3, sample_ids=ids, prompt_group_ids=ids[::8])
    decoded = codec.decode(codec.encode(event))
    assert decoded.sample_ids == ids  # type: ignore[union-attr]


def test_sample_of_many_policy_versions_is_read() -> None:
    segments = [VersionSegment(version, 1) for version in range(5_000)]
    codec = EventCodec()
    (decoded,) = split_samples(codec.decode(codec.encode(rolled_out(version_segments=segments))))
    assert decoded.version_segments == segments  # type: ignore[union-attr]
