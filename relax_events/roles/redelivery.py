"""Holds prompt groups that were delivered too often, until heartbeats show whether another rollout
worker still has them.

The broker counts deliveries without their cause. The prompt group may have crashed the workers that
leased it, and may crash the next one. Or a worker still generates it, and its lease expired or was
lost in a broker outage. Heartbeats distinguish the two cases: each rollout worker lists its prompt
groups in flight and the groups that it wrote last.

    lease at the delivery limit --> hold --> a heartbeat lists it as written   --> acknowledge
                                     |  ^--- a heartbeat lists it as in flight --- keep holding
                                     '-----> no such heartbeat for SILENT_HEARTBEATS intervals
                                             --> find_unclaimed: the caller fails the prompt group

If a silent worker is still generating, it writes its samples after the failure; the trainer drops
them as duplicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from relax_events.errors import AccessDenied, BrokerError, CorruptRecord, SchemaError
from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.kafka.leases import Lease
from relax_events.kafka.log_reader import LogReader
from relax_events.runtime.worker import Worker
from relax_events.topics.names import HEARTBEATS
from relax_events.topics.plan import belongs_on

log = structlog.get_logger()
SILENT_HEARTBEATS = 10
"""Intervals without a heartbeat after which a worker counts as gone."""
ENTITY = HEARTBEATS["rollout"]


@dataclass(slots=True)
class _Held:
    leases: list[Lease]
    since: float
    is_ended: bool = False
    claimed_at: dict[str, float] = field(default_factory=dict)
    """Time of the newest heartbeat that lists the prompt group as in flight, by worker."""

    def apply(self, worker_id: str, now: float, *, is_ended: bool, is_claimed: bool) -> None:
        self.is_ended = self.is_ended or is_ended
        if is_claimed:
            self.claimed_at[worker_id] = now
        else:
            self.claimed_at.pop(worker_id, None)

    def is_unclaimed(self, now: float, silent_seconds: float) -> bool:
        return now - max((self.since, *self.claimed_at.values())) > silent_seconds


class RedeliveryGuard:
    """See the module's docstring. It is called from the work loop only."""

    def __init__(self, worker: Worker, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._clock = worker, clock
        self._held: dict[str, _Held] = {}
        self._reader: LogReader | None = None

    def hold(self, prompt_group_id: str, lease: Lease) -> None:
        """Hold a lease until it is known whether another worker has its prompt group."""
        if prompt_group_id in self._held:
            self._held[prompt_group_id].leases.append(lease)
            return
        log.warning(
            "prompt_group.deferred", prompt_group_id=prompt_group_id, delivery=lease.delivery_count
        )
        self._held[prompt_group_id] = _Held([lease], self._clock())

    def find_unclaimed(self) -> list[Lease]:
        """Read new heartbeats; acknowledge prompt groups that other workers wrote, and return the
        leases of the groups that no worker has.

        Raises:
            AccessDenied: The role may not read heartbeats.
        """
        if not self._held:
            return []
        for heartbeat in self._read_heartbeats():
            written, claimed = (
                set(heartbeat.prompt_groups_written),
                set[str]()
                if heartbeat.state is WorkerState.STOPPED
                else set(heartbeat.prompt_groups_in_flight),
            )
            for name, held in self._held.items():
                held.apply(
                    heartbeat.worker_id,
                    self._clock(),
                    is_ended=name in written,
                    is_claimed=name in claimed,
                )
        seconds, given_up = (
            SILENT_HEARTBEATS * self._worker.config.workers.heartbeat_seconds,
            list[Lease](),
        )
        for prompt_group_id, held in list(self._held.items()):
            if held.is_ended:
                log.info("prompt_group.already_ended", prompt_group_id=prompt_group_id)
                _acknowledge_all(self._held.pop(prompt_group_id).leases)
            elif held.is_unclaimed(self._clock(), seconds):
                given_up += self._held.pop(prompt_group_id).leases
        if not self._held:
            self.close()
        return given_up

    def release(self) -> None:
        """Release the held leases, so that another worker can take them."""
        for held in self._held.values():
            for lease in held.leases:
                lease.release()
        self._held = {}

    def close(self) -> None:
        """Stop reading heartbeats."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _read_heartbeats(self) -> Iterable[WorkerHeartbeat]:
        """Return the heartbeats since the last call; the first call starts at the log's end."""
        topic_partition = (self._worker.plan.topic(ENTITY), 0)
        try:
            if self._reader is None:
                self._reader = LogReader(self._worker.connection)
                self._reader.assign({topic_partition: self._reader.watermarks(*topic_partition)[1]})
            records = self._reader.fetch(timeout_seconds=0.0)
        except AccessDenied:
            raise
        except BrokerError as error:
            log.warning("heartbeats.read_failed", error=str(error))
            for held in self._held.values():
                held.since = self._clock()  # other workers' heartbeats can't be read
            return
        for record in records:
            try:
                event = self._worker.records.codec.decode(record.value)
            except (CorruptRecord, SchemaError):
                continue
            if isinstance(event, WorkerHeartbeat) and belongs_on(ENTITY, event):
                yield event


def _acknowledge_all(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.done()
