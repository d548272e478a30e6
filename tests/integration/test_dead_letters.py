"""Dead letters are listed, requeued unchanged, and dropped; a requeued record of a prompt group
that ended is harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import ready, rolled_out, scored
from written_run import WrittenRun

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, CorruptRecord, PoisonSample, RelaxError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PromptGroupEnded, SampleColumns, SampleReady
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.objects import ObjectStore
from relax_events.ops.dead_letters import (
    DeadLetter,
    Selection,
    drop,
    read_dead_letter,
    read_dead_letters,
    requeue,
)
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime.worker import Worker
from relax_events.training.batch.assembly import BatchAssembler
from relax_events.training.batch.sample_intake import SampleIntake
from workers.advantage import AdvantageLoop
from workers.trainer import TrainLoop

GROUP = "000000-0000-0"


@pytest.fixture
def written(apply_run: Callable[..., RunConfig]) -> Iterator[WrittenRun]:
    run = WrittenRun(apply_run(run={"max_staleness": 1}, broker={"partitions_per_version": 1}))
    run.publish(0)
    yield run
    run.close()


@pytest.fixture
def open_worker(written: WrittenRun, tmp_path: Path) -> Callable[[str], Worker]:
    def opened(role: str) -> Worker:
        store = ObjectStore.open((tmp_path / "objects").as_uri())
        return Worker(
            role,
            written.config,
            claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6),
        )

    return opened


@pytest.fixture
def dead_letter(written: WrittenRun, open_worker: Callable[[str], Worker]) -> Callable[..., None]:
    """Return a function that makes a role dead-letter every record of a sample topic."""

    def refuse(role: str, entity: str, error: RelaxError) -> None:
        with open_worker(role) as worker:
            for record in records_of(written, entity):
                worker.records.dead_letter(record, error)
            worker.records.producer.flush()

    return refuse


@pytest.mark.parametrize("is_read_again", [False, True])
def test_trainer_flushes_dead_letters_before_committing_past_their_records(
    written: WrittenRun, tmp_path: Path, is_read_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations: list[tuple[int, int]] = []
    record = ProducerRecord(
        written.plan.topic("advantage.samples"), b"no event", key="absent", partition=1
    )
    written.producer.write([record])
    claim_check = StoreClaimCheck(
        ObjectStore.open((tmp_path / "objects").as_uri()), claim_check_threshold_bytes=10**6
    )
    monkeypatch.setattr(
        "relax_events.runtime.worker.LINGER_MS", 100_000.0
    )  # nothing goes by itself
    with Worker("trainer", written.config, claim_check=claim_check) as worker:
        assembler = BatchAssembler(max_staleness=written.config.run.max_staleness, decided=set())
        unused: Any = SimpleNamespace()
        intake = SampleIntake(
            worker,
            unused,
            assembler,
            library=unused,
            topic=record.topic,
            keeps_decoded=True,
        )
        loop: Any = SimpleNamespace(_worker=worker, _assembler=assembler)
        for found in records_of(written, "advantage.samples"):
            locations.append((found.partition, found.offset))
            if not is_read_again:
                assert list(intake.add_all([found], 0)) == [None]
        if is_read_again:  # a sample whose trouble shows when its step trains it
            intake.reject(locations, PoisonSample("no good"))
        consumed = TrainLoop._consumed(loop)
        (entry,) = records_of(written, "trainer.dead-letters")
    assert (entry.value, entry.headers["origin-partition"]) == (b"no event", "1")
    assert consumed == (
        [] if is_read_again else [TopicOffset(record.topic, 1, locations[0][1] + 1)]
    )


def records_of(written: WrittenRun, entity: str) -> list[Record]:
    reader = LogReader(written.connection)
    partitions = range(1 if entity.endswith("dead-letters") else written.plan.num_sample_partitions)
    try:
        return reader.read_to_end(
            [(written.plan.topic(entity), partition) for partition in partitions]
        )
    finally:
        reader.close()


def dead_letters_of(written: WrittenRun, *, roles: tuple[str, ...] = ()) -> list[DeadLetter]:
    with RunLog(written.config, name="test") as log:
        return read_dead_letters(log, roles=roles)


def requeue_all(written: WrittenRun, selection: Selection | None = None) -> int:
    with RunLog(written.config, name="test") as log:
        return requeue(
            log,
            (selection or Selection(all_roles=True)).choose(read_dead_letters(log)),
            written.producer,
        )


def test_dead_letters_are_listed_with_reason_and_origin(
    written: WrittenRun, dead_letter: Callable[..., None]
) -> None:
    written.write_bytes("rollout.samples", b"garbage", group_id=GROUP, version=0)
    dead_letter("reward", "rollout.samples", CorruptRecord("no event"))
    dead_letter("advantage", "rollout.samples", PoisonSample("no good"))
    entries = dead_letters_of(written)
    topic = written.plan.topic("rollout.samples")
    assert [(entry.id, entry.error_class, entry.error_text) for entry in entries] == [
        ("reward@0", "CorruptRecord", "no event"),
        ("advantage@0", "PoisonSample", "no good"),
    ]
    assert {entry.origin for entry in entries} == {f"{topic}[0]@0"}
    assert [entry.id for entry in dead_letters_of(written, roles=("advantage",))] == ["advantage@0"]
    with RunLog(written.config, name="test") as log:
        entry, record = read_dead_letter(log, "reward@0")
        assert (entry.num_bytes, record.value) == (7, b"garbage")
        with pytest.raises(ConfigError, match="there is no dead letter reward@1"):
            read_dead_letter(log, "reward@1")
        with pytest.raises(
            ConfigError,
            match=(
                "role 'dancer' has no dead-letter topic; roles with one: actor-forward, advantage"
            ),
        ):
            read_dead_letters(log, roles=["dancer"])


def test_requeue_writes_the_record_back_unchanged_and_only_once(
    written: WrittenRun, dead_letter: Callable[..., None]
) -> None:
    written.write_sample("rollout.samples", rolled_out(GROUP, version=1))
    dead_letter("reward", "rollout.samples", PoisonSample("the reward service was down"))
    assert requeue_all(written) == 1
    first, second = records_of(written, "rollout.samples")
    assert replace(second, offset=first.offset, timestamp_ms=first.timestamp_ms) == first
    assert [(entry.id, entry.resolution) for entry in dead_letters_of(written)] == [
        ("reward@0", "requeued")
    ]
    assert requeue_all(written) == 0
    refused = "dead letter reward@0 is requeued already; give --resolved"
    with pytest.raises(ConfigError, match=refused):
        requeue_all(written, Selection(ids=["reward@0"]))
    assert requeue_all(written, Selection(ids=["reward@0"], include_resolved=True)) == 1
    assert len(records_of(written, "rollout.samples")) == 3


def test_dropped_dead_letter_keeps_its_reason(
    written: WrittenRun, dead_letter: Callable[..., None]
) -> None:
    written.write_sample("rollout.samples", rolled_out(GROUP))
    dead_letter("reward", "rollout.samples", PoisonSample("no good"))
    with RunLog(written.config, name="test") as log:
        assert drop(log, read_dead_letters(log), written.producer, reason="written by a test") == 1
    (entry,) = dead_letters_of(written)
    assert (entry.resolution, entry.resolution_reason) == ("dropped", "written by a test")
    assert requeue_all(written) == 0
    assert len(records_of(written, "rollout.samples")) == 1


def test_requeue_rejects_a_dead_letter_with_a_forged_origin_topic(
    written: WrittenRun, dead_letter: Callable[..., None]
) -> None:
    written.write_sample("rollout.samples", rolled_out(GROUP))
    dead_letter("reward", "rollout.samples", PoisonSample("no good"))
    headers = {
        "origin-topic": written.plan.topic("control.train-steps"),
        "origin-partition": "0",
        "origin-offset": "0",
    }
    written.producer.write(
        [ProducerRecord(written.plan.topic("reward.dead-letters"), b"forged", headers=headers)]
    )
    with pytest.raises(
        ConfigError,
        match=r"dead letter reward@1 names its origin as .*control\.train-steps\[0\]@0: records of reward go back to",
    ):
        requeue_all(written)
    assert len(records_of(written, "rollout.samples")) == 1
    assert dead_letters_of(written)[0].resolution == ""


@pytest.mark.parametrize(
    ("entity", "offset", "text"),
    [
        (
            "rollout.samples",
            0,
            r"dead letter reward@1 holds other bytes than .*rollout\.samples\[0\]@0, its named origin; drop it",
        ),
        (
            "rollout.samples",
            7,
            r"can't be read, so they can't be verified: record .*rollout\.samples\[0\]@7 does not exist.*; drop them",
        ),
        (
            "advantage.samples",
            0,
            r"dead letter reward@1 names its origin as .*: records of reward go back to rollout\.samples; drop it",
        ),
    ],
)
def test_requeue_rejects_a_dead_letter_whose_contents_were_forged(
    written: WrittenRun, dead_letter: Callable[..., None], entity: str, offset: int, text: str
) -> None:
    """The operator may write every topic, and reward only its own: a dead letter must not carry
    reward's bytes to another topic."""
    written.write_sample("rollout.samples", rolled_out(GROUP))
    dead_letter("reward", "rollout.samples", PoisonSample("no good"))
    headers = {
        "origin-topic": written.plan.topic(entity),
        "origin-partition": "0",
        "origin-offset": str(offset),
    }
    forged = EventCodec().encode(rolled_out(GROUP, tokens=np.array([6, 6, 6, 6], np.int32)))
    written.producer.write(
        [
            ProducerRecord(
                written.plan.topic("reward.dead-letters"), forged, key=GROUP, headers=headers
            )
        ]
    )
    with pytest.raises(ConfigError, match=text):
        requeue_all(written)
    assert (
        len(records_of(written, "rollout.samples")),
        records_of(written, "advantage.samples"),
    ) == (1, [])


@pytest.fixture
def advantage(open_worker: Callable[[str], Worker]) -> Callable[[], AbstractContextManager[Worker]]:
    """Return what runs the advantage role until the block ends."""

    @contextmanager
    def run() -> Iterator[Worker]:
        with open_worker("advantage") as worker:
            thread = threading.Thread(target=AdvantageLoop(worker).run)
            thread.start()
            try:
                yield worker
            finally:
                worker.drain.start()
                thread.join(TIMEOUT_SECONDS)
                assert not thread.is_alive()

    return run


def await_consumed(written: WrittenRun, admin: Admin, entity: str) -> None:
    """Wait until the advantage role has dealt with all that a topic holds."""
    topic_partitions = [
        (written.plan.topic(entity), partition)
        for partition in range(written.plan.num_sample_partitions)
    ]
    ends = {
        topic_partition: end
        for topic_partition, end in admin.end_offsets(topic_partitions).items()
        if end
    }
    turn_until(
        lambda: (
            admin.committed_offsets(written.plan.consumer_group("advantage"), list(ends)) == ends
        )
    )


@pytest.mark.timeout(180)
def test_requeued_records_of_a_prompt_group_that_ended_are_harmless(
    written: WrittenRun,
    dead_letter: Callable[..., None],
    advantage: Callable[[], AbstractContextManager[Worker]],
    admin: Admin,
) -> None:
    for index in range(2):
        written.write_sample("rollout.samples", rolled_out(GROUP, index))
        written.write_sample("reward.scores", scored(GROUP, index, reward=float(index)))
    dead_letter("reward", "rollout.samples", PoisonSample("the reward service was down"))
    with advantage() as worker:
        await_consumed(written, admin, "rollout.samples")
        made = len(records_of(written, "advantage.samples"))
        assert made == 1
        requeue_all(written)  # while the prompt group's version is in the window
        await_consumed(written, admin, "rollout.samples")
        for version in (1, 2):
            written.publish(version)
        assert worker.control.wait_for_version(2, timeout_seconds=TIMEOUT_SECONDS)
        requeue_all(
            written, Selection(all_roles=True, include_resolved=True)
        )  # when it has left it, and is forgotten
        written.publish(3)
        await_consumed(written, admin, "rollout.samples")
    assert len(records_of(written, "rollout.samples")) == 6
    events = [
        EventCodec().decode(record.value) for record in records_of(written, "advantage.samples")
    ]
    again = [event for event in events if not isinstance(event, SampleColumns)]
    assert len(events) - len(again) == made, "nothing is made twice"
    assert {event.outcome for event in again if isinstance(event, PromptGroupEnded)} <= {
        Outcome.EXPIRED
    }, "the trainer knows its end"


def test_requeued_sample_that_was_trained_is_a_duplicate_for_the_trainer(
    written: WrittenRun, dead_letter: Callable[..., None]
) -> None:
    for index in range(2):
        written.write_sample("advantage.samples", ready(GROUP, index))
    dead_letter("trainer", "advantage.samples", PoisonSample("the model was too small"))
    requeue_all(written)
    assembler = BatchAssembler(max_staleness=1, decided={GROUP})
    with RunLog(written.config, name="test") as log:
        for record in log.records(
            log.full_ranges("advantage.samples", range(written.plan.num_sample_partitions))
        ):
            (event,) = log.decode_samples(record)
            assert isinstance(event, SampleReady)
            assembler.add(record, event, trainer_version=1)
    assert (assembler.pop_changes(), assembler.pending_outcomes()) == (([], []), [])
    assert [offset.offset for offset in assembler.consumed()] == [4]
