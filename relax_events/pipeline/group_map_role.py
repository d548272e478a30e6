"""A map role whose handler gets whole prompt groups: it holds samples until the last one of theirs has arrived."""

from __future__ import annotations

from relax_events.broker.deadline import Deadline
from relax_events.broker.records import Record
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut
from relax_events.pipeline.join import GroupJoin
from relax_events.pipeline.map_role import Fit, Handle, MapRole
from relax_events.pipeline.worker import Worker


class GroupMapRole(MapRole):
    """The loop of a map role, with samples handed over by prompt group, in the order of their index, side by side.

    An input offset is committed once no open prompt group needs its record, so a successor gathers again what we held. A
    prompt group that is never completed, since its generation was cut short, is let go when its version leaves the window.
    """

    def __init__(self, worker: Worker, handle: Handle, *, max_records: int = 256, max_part_records: int | None = None) -> None:
        self._join = GroupJoin(evaluators=frozenset(), needs_scores=False)
        super().__init__(worker, handle, max_records=max_records, max_part_records=max_part_records)

    def _sample(self, record: Record) -> SampleRolledOut | None:
        sample = super()._sample(record)
        if sample is None and (group := self._join.poison(record, "a sample of it is unusable")) is not None:
            self._join.close(group)
        return sample

    def _ready(self, fit: list[Fit]) -> list[Fit]:
        ready: list[Fit] = []
        for record, sample in fit:
            if (group := self._join.add(record, sample)) is not None:
                self._join.close(group)
                ready += [(record, member) for member in group.ordered_samples()]
        return ready

    def _done_offsets(self, records: list[Record]) -> list[TopicOffset]:
        for record in {(record.topic, record.partition): record for record in records}.values():
            if self._worker.is_expired(record.policy_version):
                self._join.pass_over(record)  # the join knows the others
        return self._join.low_watermarks()

    def _take_versions(self) -> None:
        super()._take_versions()
        for group in self._join.expired(self._worker.control.policy_version - self._worker.config.run.max_staleness):
            self._join.close(group)

    def _give_back(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        self._consumer.commit(self._join.low_watermarks(), wait=deadline)
        for offset in offsets:
            self._join.drop_partition(offset.topic, offset.partition)
