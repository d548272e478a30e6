"""Does a long log cost anything? Passing stale records, and writing, reading and asking for
positions, from a thousand records to a million.

Records are small, so that what is measured is the log and not the bytes; no one's decode is in it.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.planes.kafka import ENTITY, plan_of
from relax_events.deadline import Deadline
from relax_events.events.parts import TopicOffset
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord, Record
from relax_events.staleness.window import find_skip_targets, is_expired

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
NUM_ROUNDS = 9
NUM_BATCH = 1000
STALE, FRESH = 0, 3  # policy versions of one slot when staleness is bounded by 1
VALUE = bytes(64)
DEADLINE_SECONDS = 120.0
FLAT_RATIO = 1.10


QUESTION = f"""One partition of a sample topic grows, on the embedded broker. A member of a consumer group stands at its beginning when a new
policy version takes over the slot: it seeks, and reads the version's first record (a request that is under way, which may wait 100 ms for
records, is answered first). Also measured: reading and passing over every stale record; writing up to {NUM_BATCH:,} records, and reading those, at
the end; asking for the ends and the committed positions of all partitions. Medians of {NUM_ROUNDS} rounds."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds, each the median of its rounds, at one length of the log; reading everything is
    done once."""

    num_stale: int
    skip_ms: float
    read_all_ms: float
    write_us: float
    read_us: float
    positions_ms: float


class Log:
    """A sample topic of which one partition grows; a member of a consumer group reads it."""

    def __init__(self, address: str, *, run_id: str, partition: int = 0) -> None:
        self._connection, self._plan, self._partition = (
            Connection(address, client_id="bench.skip"),
            plan_of(run_id),
            partition,
        )
        self.topic = self._plan.topic(ENTITY)
        self._admin, self._producer = Admin(self._connection), RecordProducer(self._connection)
        self._admin.create([spec for spec in self._plan.specs() if spec.name == self.topic])
        self._group = self._plan.consumer_group("reader")
        self._consumer = SubscribedConsumer(
            self._connection, consumer_group=self._group, topics=[self.topic]
        )
        while not self._consumer.positions:
            self._consumer.fetch(timeout_seconds=0.1)
        self.length = 0

    def append(self, count: int, *, policy_version: int = STALE) -> None:
        """Write records and return when they are acknowledged."""
        headers = {POLICY_VERSION_HEADER: str(policy_version)}
        self._producer.write(
            ProducerRecord(self.topic, VALUE, partition=self._partition, headers=headers)
            for _ in range(count)
        )
        self.length += count

    def go_to(self, offset: int) -> None:
        """Set the position before a record, with later records prefetched."""
        self._seek(offset)
        self._read(lambda version: True)

    def skip(self) -> None:
        """Do what a map role does when a version takes over its slot: go to where its records
        begin, and read the first."""
        positions = {
            partition: position for (_, partition), position in self._consumer.positions.items()
        }
        for partition, offset in find_skip_targets(
            positions, [(self._partition, self.length - 1)]
        ).items():
            self._consumer.seek(self.topic, partition, offset)
        self._read(lambda version: version == FRESH)

    def read_all(self) -> None:
        """Read without seeking: from the beginning, checking each header and skipping the record."""
        self._seek(0)
        self._read_to_end(
            lambda version: is_expired(version, trainer_version=FRESH, max_staleness=1)
        )

    def follow(self) -> None:
        """Read what was written since."""
        self._read_to_end(lambda _: True)

    def positions(self) -> None:
        """Request the end offsets and the committed offsets, as lag is computed and a
        purge is planned."""
        topic_partitions = [
            (self.topic, partition) for partition in range(self._plan.num_sample_partitions)
        ]
        self._admin.end_offsets(topic_partitions)
        self._admin.committed_offsets(self._group, topic_partitions)

    def commit(self) -> None:
        """Say that all is done with."""
        self._consumer.commit([TopicOffset(self.topic, self._partition, self.length)])

    def _read(self, is_wanted: Callable[[int], bool]) -> None:
        """Fetch until a record of a wanted version comes."""
        deadline = Deadline(DEADLINE_SECONDS)
        while not any(is_wanted(record.policy_version or 0) for record in self._fetched(deadline)):
            pass

    def _read_to_end(self, look: Callable[[int], object]) -> None:
        deadline = Deadline(DEADLINE_SECONDS)
        while self._consumer.positions[self.topic, self._partition] < self.length:
            for record in self._fetched(deadline):
                look(record.policy_version or 0)

    def _fetched(self, deadline: Deadline) -> list[Record]:
        """Fetch once.

        Raises:
            TimeoutError: The deadline has passed.
        """
        if deadline.passed:
            raise TimeoutError(
                f"{self.topic}[{self._partition}] of {self.length} records was not read "
                f"within {DEADLINE_SECONDS:g} s"
            )
        return self._consumer.fetch(timeout_seconds=1.0)

    def _seek(self, offset: int) -> None:
        self._consumer.seek(self.topic, self._partition, offset)

    def close(self) -> None:
        """Delete the topic and leave."""
        self._admin.delete([self.topic])
        self._consumer.close()
        self._producer.close()
        self._admin.close()


def seconds_of(action: Callable[[], None]) -> float:
    """Return how long an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def costs(log: Log, num_stale: int) -> Costs:
    """Grow the log to so many stale records and one fresh one, and measure."""
    batch = min(NUM_BATCH, num_stale // (NUM_ROUNDS + 1))
    write, skip, read, positions = [], [], [], []
    log.append(num_stale - log.length - NUM_ROUNDS * batch)
    log.go_to(log.length - 1)
    for _ in range(NUM_ROUNDS):
        write += [seconds_of(lambda: log.append(batch))]
        read += [seconds_of(log.follow)]
        log.commit()
        positions += [seconds_of(log.positions)]
    log.append(1, policy_version=FRESH)
    for _ in range(NUM_ROUNDS):
        log.go_to(0)
        skip += [seconds_of(log.skip)]
    everything = seconds_of(log.read_all)
    return Costs(
        num_stale,
        statistics.median(skip) * 1e3,
        everything * 1e3,
        statistics.median(write) / batch * 1e6,
        statistics.median(read) / batch * 1e6,
        statistics.median(positions) * 1e3,
    )


def row_of(one: Costs) -> dict[str, str]:
    """Lay out one length."""
    return {
        "stale records": f"{one.num_stale:,}",
        "skipping them, ms": f"{one.skip_ms:.1f}",
        "reading them instead, ms": f"{one.read_all_ms:,.0f}",
        "write, us a record": f"{one.write_us:.1f}",
        "read, us a record": f"{one.read_us:.1f}",
        "ask for positions, ms": f"{one.positions_ms:.1f}",
    }


def growth(found: Sequence[Costs], name: str) -> str:
    """Say how a cost at the last length compares with the one at the first."""
    ratio = getattr(found[-1], name) / getattr(found[0], name)
    return f"{ratio:.2f}x ({'flat or less' if ratio <= FLAT_RATIO else 'more'})"


def publish(found: Sequence[Costs], *, folder: Path) -> None:
    """Write the page."""
    grown = [one for one in found if one.num_stale >= 10_000] or found
    span = f"from {found[0].num_stale:,} to {found[-1].num_stale:,} records"
    later = f"from {grown[0].num_stale:,} to {grown[-1].num_stale:,}"
    report.write(
        "skip",
        title="What a long log costs",
        question=QUESTION,
        command="python -m benchmarks.skip",
        rows=[row_of(one) for one in found],
        conclusion=f"{span[0].upper()}{span[1:]}, skipping takes {growth(found, 'skip_ms')}. "
        f"{later[0].upper()}{later[1:]}, a write takes "
        f"{growth(grown, 'write_us')}, a read {growth(grown, 'read_us')}, asking for "
        f"positions {growth(grown, 'positions_ms')} of the time; "
        f"flat means within {FLAT_RATIO - 1:.0%}.",
        data=[vars(one) for one in found],
        folder=folder,
    )


def measure(address: str, lengths: Sequence[int]) -> list[Costs]:
    """Measure at each length, after a warm-up at the first."""
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    warm = Log(address, run_id=f"{run_id}-warm", partition=1)
    costs(warm, lengths[0])
    warm.close()
    log = Log(address, run_id=run_id)
    found = [costs(log, length) for length in lengths]
    log.close()
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(LENGTHS),
        help="numbers of stale records, growing",
    )
    options = parser.parse_args(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the broker ends with us
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedBroker(Path(folder), has_password=False) as broker,
    ):
        found = measure(broker.bootstrap_servers, options.lengths)
    publish(found, folder=report.FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
