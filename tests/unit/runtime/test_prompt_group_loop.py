"""The prompt group loop: its output, and the offsets up to which its input is done. Worker and
consumer are fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from event_samples import rolled_out

from relax_events.deadline import Deadline
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime import sample_input
from relax_events.runtime.processors import SampleLoop, WholePromptGroups
from relax_events.telemetry.traces import Traces

pytestmark = pytest.mark.unit
A, B = "000000-0000-0", "000000-0001-0"


class Stage:
    """A role with what it was given, sent and committed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handled: list[list[str]] = []
        self.committed: list[dict[int, int]] = []
        self.dead_letters: list[str] = []
        self.events: dict[bytes, list[SampleRolledOut]] = {}
        consumer = SimpleNamespace(commit=self._commit, positions={}, seek=lambda *_: None)
        monkeypatch.setattr(sample_input, "SubscribedConsumer", lambda *_, **__: consumer)
        nothing = SimpleNamespace(
            send=lambda _: None, flush=lambda: None, count_expired=lambda _: None
        )
        self.worker: Any = SimpleNamespace(
            role="reward",
            connection=None,
            plan=SimpleNamespace(topic=lambda entity: entity, consumer_group=lambda role: role),
            config=SimpleNamespace(run=SimpleNamespace(max_staleness=0)),
            control=SimpleNamespace(
                policy_version=0,
                wait_until_published=lambda _: None,
                is_expired=lambda version: (
                    version is not None and version < self.worker.control.policy_version
                ),
            ),
            metrics=nothing,
            heartbeat=SimpleNamespace(set_in_flight=lambda _: None),
            records=SimpleNamespace(
                producer=nothing,
                decode_samples=lambda record: self.events[record.value],
                build_end_request=lambda key, *_: key,
                dead_letter=lambda record, _: self.dead_letters.append(record.key),
                traces=Traces(),
            ),
            lifecycle=SimpleNamespace(
                record_processed=lambda *_: None,
                record_progress=lambda: None,
                track_lag=lambda _: None,
            ),
        )
        self.gatherer = WholePromptGroups(self.worker)
        self.loop = SampleLoop(self.worker, self._handle, gatherer=self.gatherer)

    def _handle(self, samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
        self.handled.append([sample.sample_id for sample in samples])
        return []

    def _commit(self, offsets: list[TopicOffset], *, wait: Deadline | None = None) -> None:
        self.committed.append({offset.partition: offset.offset for offset in offsets})

    def process(self, *records: Record) -> None:
        """Let the role take these as one part."""
        self.loop._input.fetched.extend(records)
        self.loop._process_part()

    def read(
        self, offset: int, group_id: str, index: int, *, version: int = 0, is_garbage: bool = False
    ) -> Record:
        """Make a record of a sample; each prompt group has three."""
        value = f"{offset}".encode()
        self.events[value] = (
            [] if is_garbage else [rolled_out(group_id, index, version=version, of=3)]
        )
        return Record(
            "rollout.samples", 0, offset, group_id, value, {"policy-version": str(version)}, 0
        )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_prompt_groups_are_processed_complete_and_in_order(stage: Stage) -> None:
    stage.process(stage.read(0, A, 2), stage.read(1, B, 0), stage.read(2, A, 0))
    assert stage.handled == []
    assert stage.committed == [{0: 0}], "a successor needs the first record again"
    stage.process(stage.read(3, A, 1), stage.read(4, B, 2))
    assert stage.handled == [[f"{A}/0", f"{A}/1", f"{A}/2"]]
    stage.process(stage.read(5, B, 2), stage.read(6, B, 1), stage.read(7, A, 1))
    assert stage.handled[1:] == [[f"{B}/0", f"{B}/1", f"{B}/2"]]
    assert stage.committed[1:] == [{0: 1}, {0: 8}], "a repeated record is skipped"


def test_prompt_group_with_an_unusable_sample_blocks_no_commit(stage: Stage) -> None:
    stage.process(stage.read(0, A, 0), stage.read(1, A, 1, is_garbage=True), stage.read(2, A, 2))
    assert (stage.handled, stage.committed) == ([], [{0: 3}])


def test_incomplete_prompt_group_is_dropped_when_its_version_leaves_the_window(
    stage: Stage,
) -> None:
    stage.process(stage.read(0, A, 0))
    stage.worker.control.policy_version = 1
    stage.gatherer.evict_older_than(1)
    stage.process(stage.read(1, A, 1), stage.read(2, B, 0, version=1), stage.read(3, A, 2))
    assert (stage.handled, stage.committed) == ([], [{0: 0}, {0: 2}])


def test_revoked_partition_is_committed_and_its_state_dropped(stage: Stage) -> None:
    stage.process(stage.read(0, A, 0), stage.read(1, A, 1))
    stage.loop._release([TopicOffset("rollout.samples", 0, 2)], Deadline(1.0))
    assert stage.committed == [{0: 0}, {0: 0}]
    stage.process(stage.read(0, A, 0), stage.read(1, A, 1), stage.read(2, A, 2))
    assert stage.handled == [[f"{A}/0", f"{A}/1", f"{A}/2"]]
