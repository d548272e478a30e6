"""Arrays of samples are fetched ahead in threads, each once, and kept until their step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_events.errors import CorruptRecord, RelaxError, StoreUnavailable
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ObjectRef
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleReady
from relax_events.kafka.records import Record
from relax_events.objects import ObjectStore, check_in
from relax_events.objects.claim_check import ArraysAhead
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime import record_io
from relax_events.runtime.record_io import RecordIO
from relax_events.telemetry.traces import Traces
from relax_events.topics import TopicPlan
from relax_events.training.batch import sample_intake
from relax_events.training.batch.assembly import BatchAssembler
from relax_events.training.batch.sample_intake import HeldArrays, SampleIntake
from tests.event_samples import ready
from tests.small_settings import small_run

pytestmark = pytest.mark.component
NUM_GROUPS, OF = 6, 2
EXPERT_BYTES = 3 * 100 * 4


class CountingStore(ObjectStore):
    """Counts reads by object, in all of its copies."""

    reads: ClassVar[Counter[str]] = Counter()
    main_reads: ClassVar[Counter[str]] = Counter()
    fails_in_threads: ClassVar[type[Exception] | None] = None

    def get(self, reference: ObjectRef) -> bytes:
        is_main = threading.current_thread() is threading.main_thread()
        (CountingStore.main_reads if is_main else CountingStore.reads)[reference.uri] += 1
        if CountingStore.fails_in_threads and not is_main:
            raise CountingStore.fails_in_threads("away")
        return super().get(reference)


class Intake:
    """An intake with what it needs of a worker, on a counting store."""

    def __init__(self, folder: Path, *, keeps_decoded: bool = True) -> None:
        self.config = small_run(
            {
                "run": {"id": "test", "prompts_per_step": NUM_GROUPS, "samples_per_prompt": OF},
                "model": {"path": folder, "device": "cpu"},
                "data": {"source": "jsonl:unused"},
            }
        )
        CountingStore.reads, CountingStore.main_reads = Counter(), Counter()
        CountingStore.fails_in_threads = None
        self.store = CountingStore.open((folder / "objects").as_uri())
        self.plan, self.codec = TopicPlan.from_config(self.config), EventCodec()
        self.dead: list[tuple[Record, str]] = []
        stub: Any = SimpleNamespace()
        self.records = RecordIO(
            "trainer", "trainer-0", plan=self.plan, codec=self.codec, producer=stub, control=stub,
            claim_check=StoreClaimCheck(self.store, claim_check_threshold_bytes=10**6),
            metrics=stub, traces=Traces(),
        )  # fmt: skip
        self.records.dead_letter = self._note  # type: ignore[method-assign]
        self.assembler = BatchAssembler(max_staleness=2, decided=set())
        worker: Any = SimpleNamespace(records=self.records, config=self.config)
        backend: Any = SimpleNamespace(vocab_size=300, experts=None)
        self.intake = SampleIntake(
            worker, backend, self.assembler, library=stub, topic="t", keeps_decoded=keeps_decoded
        )

    def _note(self, record: Record, error: RelaxError) -> None:
        self.dead.append((record, type(error).__name__))

    def write(self) -> list[Record]:
        """Return the records of prompt groups whose samples have their experts in the store."""
        records = []
        for group in range(NUM_GROUPS):
            group_id = f"000000-{group:04}-0"
            for index in range(OF):
                experts = np.full((3, 100, 4), 10 * group + index, np.uint8)
                sample = ready(group_id, index, of=OF, routed_experts=experts)
                stored = check_in(sample, self.store, claim_check_threshold_bytes=1000)
                records.append(
                    Record(
                        self.plan.topic("advantage.samples"), self.plan.partition(group_id, 0),
                        len(records), group_id, self.codec.encode(stored), {}, 0,
                    )
                )  # fmt: skip
        return records

    def train(self) -> list[SampleReady]:
        """Take the samples of all ready prompt groups."""
        changes, _ = self.assembler.pop_changes()
        return [
            located.sample
            for group in changes
            for located in self.intake.restore(self.assembler.take(group))
        ]


def experts_of(samples: Sequence[SampleReady]) -> list[int]:
    return [int(np.asarray(sample.routed_experts)[0, 0, 0]) for sample in samples]


ALL = [10 * group + index for group in range(NUM_GROUPS) for index in range(OF)]


def test_each_sample_is_fetched_once_and_in_a_thread(tmp_path: Path) -> None:
    one = Intake(tmp_path)
    for _ in one.intake.add_all(one.write(), 0):
        pass
    assert experts_of(one.train()) == ALL
    assert list(CountingStore.reads.values()) == [1] * len(ALL)
    assert not CountingStore.main_reads
    assert not one.dead


def test_fetched_arrays_are_held_up_to_a_number_of_bytes_until_they_are_used(
    tmp_path: Path,
) -> None:
    room = 5
    one = Intake(tmp_path)
    records = one.write()
    samples = [one.records.fetch_samples(one.codec.decode(record.value))[0] for record in records]
    num_bytes = sample_intake.count_array_bytes(samples[0])
    one.intake._fetched = HeldArrays(room * num_bytes)
    samples.clear()
    CountingStore.reads.clear()
    for _ in one.intake.add_all(records, 0):
        pass
    assert one.intake._fetched._room == 0
    trained = one.train()
    assert experts_of(trained) == ALL
    assert sorted(CountingStore.reads.values()) == [1] * room + [2] * (len(ALL) - room)
    assert not CountingStore.main_reads
    del trained
    one.assembler.mark_done([f"000000-{group:04}-0" for group in range(NUM_GROUPS)])
    assert one.intake._fetched._room == room * num_bytes


def test_records_are_decoded_ahead_by_a_fixed_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_io, "NUM_AHEAD", 3)
    one = Intake(tmp_path)
    asked: list[Record] = []

    def read() -> Any:
        for record in one.write():
            asked.append(record)
            yield record

    handled = 0
    for record, events in one.records.decode_all(read()):
        assert record is asked[handled]
        assert len(events) == 1
        handled += 1
        assert len(asked) == min(handled + 3, len(ALL))
    assert handled == len(ALL)


def test_no_more_bytes_are_begun_than_there_is_room_for(tmp_path: Path) -> None:
    one = Intake(tmp_path)
    records = one.write()
    events: list[Any] = [split_samples(one.codec.decode(record.value))[0] for record in records]
    with ArraysAhead(one.store, max_bytes=2 * EXPERT_BYTES + 1) as ahead:
        for event in events:
            ahead.begin(event)
        fetched = [ahead.check_out(event) for event in events]
    assert experts_of(fetched) == ALL
    assert sum(CountingStore.reads.values()) == 2
    assert sum(CountingStore.main_reads.values()) == len(ALL) - 2


def test_missing_object_makes_its_record_alone_a_dead_letter(tmp_path: Path) -> None:
    one = Intake(tmp_path)
    records = one.write()
    (tmp_path / "objects").joinpath(one.store.list("")[0]).unlink()
    for _ in one.intake.add_all(records, 0):
        pass
    ((record, reason),) = one.dead
    assert reason == "ObjectError"
    assert len(one.train()) == len(ALL) - OF
    (ended,) = one.assembler.pending_outcomes()
    assert ended.prompt_group_id == record.key
    assert ended.reason == "record could not be decoded"


def test_outage_is_waited_for_by_the_work_loop_and_costs_no_record(tmp_path: Path) -> None:
    one = Intake(tmp_path)
    records = one.write()
    CountingStore.fails_in_threads = StoreUnavailable
    for _ in one.intake.add_all(records, 0):
        pass
    assert experts_of(one.train()) == ALL
    assert list(CountingStore.main_reads.values()) == [1] * len(ALL)
    assert not one.dead


def test_fetches_ahead_do_not_wait_for_an_absent_store(tmp_path: Path) -> None:
    store = CountingStore.open((tmp_path / "objects").as_uri())
    assert store._waits
    hasty = store.without_waiting()
    assert not hasty._waits
    assert hasty.get(store.put(b"bytes")) == b"bytes"


def test_ranks_that_exchange_samples_fetch_those_that_they_train_ahead(tmp_path: Path) -> None:
    one = Intake(tmp_path, keeps_decoded=False)
    for _ in one.intake.add_all(one.write(), 0):
        pass
    changes, _ = one.assembler.pop_changes()
    held = [held for group in changes for held in one.assembler.take(group)]
    encoded = [(each.value, (each.partition, each.offset)) for each in held]  # type: ignore[union-attr]
    encoded[3] = (b"no event", encoded[3][1])
    CountingStore.reads.clear()
    with one.records.open_ahead() as ahead:
        decodes = one.intake.plan_decoding(encoded, ahead)
        samples = [decode().sample for decode in decodes[:3]]
        with pytest.raises(CorruptRecord):
            decodes[3]()
        samples += [decode().sample for decode in decodes[5:]]
        samples.append(decodes[0]().sample)  # again, as in smaller passes
    assert experts_of(samples) == [*ALL[:3], *ALL[5:], ALL[0]]
    assert sorted(CountingStore.reads.values()) == [1] * (len(ALL) - 2) + [2]
    assert not CountingStore.main_reads
