"""Strangers write garbage into the run's topics: it is dead-lettered with a reason, and hurts nobody else."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterator

import fastavro
import numpy as np
from event_samples import ready, rolled_out
from harness import FaultRun, assert_books_balance

from relax_events.broker.producer import RecordProducer
from relax_events.broker.records import OutRecord
from relax_events.errors import CorruptRecord, PoisonSample
from relax_events.events.codec import EventCodec
from relax_events.events.types import Event, ObjectRef, PromptGroupEnded, StoredArray

CODEC = EventCodec()
STRANGE = "000900-0000-0"  # a well-formed id that nobody issued
NAN = np.array([0, 0, np.nan, -0.25], np.float32)
SCORERS = ("reward", "reference", "actor-forward", "advantage")


def with_shape(event: Event, field: str, shape: list[int]) -> bytes:
    """Encode an event with an array whose shape is a lie, which our own code refuses to write."""
    header, schema, to_record = CODEC._writers[type(event)]
    record = to_record(event)
    record[field] = {**record[field], "shape": shape}
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema, record)
    return header + buffer.getvalue()


def poisoned(event: Event) -> Iterator[tuple[str, bytes]]:
    """Give bytes that no worker can use, with the class of error that each deserves."""
    whole = CODEC.encode(event)
    yield CorruptRecord.__name__, b"garbage"
    yield CorruptRecord.__name__, b""
    yield CorruptRecord.__name__, whole[:-7]
    yield CorruptRecord.__name__, with_shape(event, "tokens", [10**9])
    yield CorruptRecord.__name__, with_shape(event, "rollout_logprobs", [10**9, 10**9])
    yield PoisonSample.__name__, CODEC.encode(dataclasses.replace(event, rollout_logprobs=NAN))
    missing = StoredArray("<i4", (10**9,), ObjectRef("file:///nowhere/at-all", bytes(32), 4 * 10**9))
    yield "ObjectError", CODEC.encode(dataclasses.replace(event, tokens=missing))


def test_poison_is_dead_lettered_and_the_run_goes_on(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 16})
    run.start()
    run.until_steps(3)
    version = run.state.policy_version
    sample = rolled_out(STRANGE, of=4, version=version)
    strange_version = dataclasses.replace(sample, policy_version=10**6, min_policy_version=10**6, max_policy_version=10**6)
    strange_tokens = dataclasses.replace(
        sample, tokens=np.array([5, 6, 10**8, 8], np.int32), prompt_group_id="000900-0001-0", sample_id="000900-0001-0/0"
    )
    producer = RecordProducer(run.connection)
    for entity, event in (("rollout.samples", sample), ("advantage.samples", ready(STRANGE, of=4, version=version))):
        for _, value in poisoned(event):
            producer.send(OutRecord(run.plan.topic(entity), value, key="", partition=0))
            producer.send(OutRecord(run.plan.topic(entity), value, key=STRANGE, partition=1))
    for event in (strange_version, strange_tokens):
        producer.send(OutRecord(run.plan.topic("rollout.samples"), CODEC.encode(event), key=event.prompt_group_id, partition=0))
    for key, value in (("", b"garbage"), ("no id", b"\xc3\x01garbage"), (STRANGE, CODEC.encode(sample)), (STRANGE, b"\xc3\x01")):
        producer.send(OutRecord(run.plan.topic("prompt.groups"), value, key=key))
    producer.flush()
    producer.close()
    pids = {worker_id: run.pid(worker_id) for worker_id in run.worker_ids}

    assert run.until_ended(run.process) == 0
    ledger = assert_books_balance(run)
    assert {worker_id: run.pid(worker_id) for worker_id in run.worker_ids} == pids, "poison killed nobody"
    assert (ledger["outcomes"]["failed"], ledger["outcomes"]["issued"]) == (0, 16 * 8), "nobody's prompt group was hurt"
    assert ledger["samples_foreign"] > 0
    expected = Counter(name for name, _ in poisoned(sample) for _ in range(2))
    for role in (*SCORERS, "trainer"):
        letters = run.records(f"{role}.dead-letters")
        found = Counter(letter.headers["error-class"] for letter in letters)
        assert all(found[name] >= count for name, count in expected.items()), (role, found)
        assert all(letter.headers["error-text"] and letter.headers["origin-offset"].isdigit() for letter in letters)
    assert len(run.records("rollout.dead-letters")) == 4
    ended = [event for record in run.records("control.group-outcomes") if isinstance(event := CODEC.decode(record.value), PromptGroupEnded)]
    strangers = [event for event in ended if event.prompt_group_id == STRANGE]
    assert [event.outcome.value for event in strangers] == ["failed"], "a stranger's prompt group is ended once, as failed"
