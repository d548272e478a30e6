"""Invalid input that unknown producers may write into a run's topics: bytes that no worker can
decode, and records that no broker accepts.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

import fastavro
import numpy as np
from event_samples import issued, ready, rolled_out

from relax_events.errors import CorruptRecord, PoisonSample
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ObjectRef, StoredArray
from relax_events.events.sample_columns import join_one
from relax_events.events.types import Sample
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.topics import TopicPlan

CODEC = EventCodec()
STRANGE = "900000-0000-0"  # a well-formed id that was not issued
FORGED = (
    issued("000103-0099-0", of=4),
    issued("000104-0001-0", of=3),
    issued("000105-0001-0", of=4),
)
"""Prompts of a form that the prompter of a run with 8 prompts a step, of 4 samples, never writes,
the last one since its first version is 0."""
OVERSIZE_BYTES = 17 * 1024**2  # topics take 16 MiB
NAN = np.array([0, 0, np.nan, -0.25], np.float32)


def with_shape(event: Sample, field: str, shape: list[int]) -> bytes:
    """Encode an event with an array of a wrong shape, which our own code refuses to write."""
    columns = join_one(event)
    header, schema, to_record = CODEC._writers[type(columns)]
    record = to_record(columns)
    record[field] = {**record[field], "shape": shape}
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema, record)
    return header + buffer.getvalue()


def poisoned(event: Sample) -> Iterator[tuple[str, bytes]]:
    """Yield bytes that no worker can use, with the class of error that each deserves."""
    whole = CODEC.encode(event)
    yield CorruptRecord.__name__, b"garbage"
    yield CorruptRecord.__name__, b""
    yield CorruptRecord.__name__, whole[:-7]
    yield CorruptRecord.__name__, with_shape(event, "tokens", [10**9])
    yield CorruptRecord.__name__, with_shape(event, "rollout_logprobs", [10**9, 10**9])
    yield PoisonSample.__name__, CODEC.encode(dataclasses.replace(event, rollout_logprobs=NAN))
    missing = StoredArray(
        "<i4", (10**9,), ObjectRef("file:///nowhere/at-all", bytes(32), 4 * 10**9)
    )
    yield "ObjectError", CODEC.encode(dataclasses.replace(event, tokens=missing))


def poison_samples(producer: RecordProducer, plan: TopicPlan, *, version: int) -> int:
    """Write poison into the topics that scorers and trainer read, in the partitions of a version;
    return how many records.
    """
    slot = plan.partitions_of_version(version)
    events = {
        "rollout.samples": rolled_out(STRANGE, of=4, version=version),
        "advantage.samples": ready(STRANGE, of=4, version=version),
    }
    records = [
        ProducerRecord(plan.topic(entity), value, key=key, partition=partition)
        for entity, event in events.items()
        for _, value in poisoned(event)
        for key, partition in (("", slot[0]), (STRANGE, slot[-1]))
    ]
    producer.write(records)
    return len(records)


def poison_prompts(producer: RecordProducer, plan: TopicPlan, *, version: int) -> int:
    """Write poison into the prompt queue; return how many records."""
    sample = CODEC.encode(rolled_out(STRANGE, of=4, version=version))
    values = (
        ("", b"garbage"),
        ("no id", b"\xc3\x01garbage"),
        (STRANGE, sample),
        (STRANGE, b"\xc3\x01"),
        *((prompt.prompt_group_id, CODEC.encode(prompt)) for prompt in FORGED),
    )
    producer.write(
        ProducerRecord(plan.topic("prompt.groups"), value, key=key) for key, value in values
    )
    return len(values)
