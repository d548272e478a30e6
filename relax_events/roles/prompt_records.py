"""Builds, writes and reads the records of the queue of prompts."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from relax_events.config import RunSection
from relax_events.data.prompt_sampler import SelectedRow
from relax_events.data.rows import MessageReader
from relax_events.data.stream import PromptStream
from relax_events.deadline import Deadline
from relax_events.errors import CorruptRecord, Fenced, PoisonSample, SchemaError
from relax_events.events.types import Event, PrompterStateSaved, PromptGroupIssued
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import retry_while_unavailable
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import DELIVERY_SECONDS, LINGER_MS, RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime.issue_rules import IssueRules
from relax_events.runtime.validation import check_issued
from relax_events.runtime.worker import Worker
from relax_events.staleness import IssuedGroup, is_external
from relax_events.topics import compute_shard
from relax_events.topics.names import PROMPT_GROUPS, PROMPTER_STATE
from relax_events.topics.partitions import TopicPartition

RETRY_SECONDS = 0.1


class PromptQueue:
    """The queue of prompts and control.prompter-state, as their one writer sees them.

    The prompter that wrote the newest summary owns both. A prompter writes one when it starts,
    before it reads what was issued. Before each write it looks whether either topic has grown: it
    ends if another one owns them, and learns what that one issued meanwhile. The queue takes no
    transactions: the client of a share group does not acknowledge their markers (ADR 82).
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._writer_id, self._owner_id = worker, uuid.uuid4().hex, ""
        plan, self._rules = worker.plan, IssueRules.from_config(worker.config)
        self._state: TopicPartition = (plan.topic(PROMPTER_STATE), 0)
        self.partitions: list[TopicPartition] = [
            (plan.topic(PROMPT_GROUPS), partition) for partition in range(plan.queue_partitions)
        ]
        self._ends: dict[TopicPartition, int] = {}
        self._written: list[ProducerRecord] = []
        """Prompt groups that this process has written behind those ends."""
        self._admin, self._reader = Admin(worker.connection), LogReader(worker.connection)
        self._producer = RecordProducer(
            worker.connection,
            linger_ms=LINGER_MS,
            max_batch_records=worker.config.prompt_groups_per_lease(),
        )

    def claim(self, summary: PrompterStateSaved) -> None:
        """Become the owner.

        Args:
            summary: The newest of the log; or that of a prompter that has issued nothing.
        """
        self._ends = self._read_ends()
        self.save(summary)

    def know(self, ends: Mapping[TopicPartition, int]) -> None:
        """Note up to which offsets the queue was read."""
        self._ends |= ends

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """The offsets up to which this prompter knows the queue, directly after a look."""
        return {at: self._ends[at] for at in self.partitions}

    def look(self) -> list[PromptGroupIssued]:
        """Return what others have issued since the last look.

        Raises:
            Fenced: Another prompter took over.
            BrokerError: The broker stayed unavailable.
        """
        ends, written = self._read_ends(), self._written
        num_written = Counter((record.topic, record.partition) for record in written)
        unread = {
            at: (begin, ends[at])
            for at, begin in self._ends.items()
            if ends[at] > begin + num_written[at]
        }
        own_ids = {record.key for record in written}
        issued = []
        for record in self._reader.stream(unread):
            event = self.decode(record)
            if isinstance(event, PrompterStateSaved):
                self._owner_id = event.writer_id
            elif isinstance(event, PromptGroupIssued) and event.prompt_group_id not in own_ids:
                issued.append(event)
        self._ends, self._written = ends, []
        if self._owner_id != self._writer_id:
            raise Fenced("another prompter of this run took over; end this one")
        return issued

    def decode(self, record: Record) -> Event | None:
        """Return the event of a record that a prompter reads; None for a record of an unknown
        producer, which the rollout role generates as an external one or writes to the dead letters.
        """
        with suppress(CorruptRecord, PoisonSample, SchemaError):
            event = self._worker.records.codec.decode(record.value)
            if not isinstance(event, PromptGroupIssued):
                return event
            self._rules.check_prompt(check_issued(event))
            return None if is_external(event.prompt_group_id) else event
        return None

    def _read_ends(self) -> dict[TopicPartition, int]:
        return retry_while_unavailable(
            lambda: self._admin.end_offsets([self._state, *self.partitions]),
            Deadline(DELIVERY_SECONDS),
            pause_seconds=RETRY_SECONDS,
        )

    def issue(self, records: Collection[ProducerRecord], *, max_batch_records: int) -> None:
        """Write prompt groups, after a look.

        Args:
            records: The prompt groups.
            max_batch_records: The most records that a rollout worker leases at once.
        """
        self._producer.write(records, max_batch_records=max_batch_records)
        self._written += [
            ProducerRecord(record.topic, None, key=record.key, partition=record.partition)
            for record in records
        ]

    def save(self, summary: PrompterStateSaved) -> None:
        """Write a summary, after a look."""
        signed = replace(summary, writer_id=self._writer_id)
        self._worker.records.producer.write(
            [self._worker.records.build(PROMPTER_STATE, signed, key="prompter")]
        )

    def close(self) -> None:
        """Close the clients."""
        self._producer.close()
        self._reader.close()
        self._admin.close()


def build_prompt_record(
    worker: Worker,
    group: IssuedGroup,
    choice: SelectedRow,
    *,
    stream: PromptStream,
    read_messages: MessageReader,
    lost_worker: str = "",
) -> ProducerRecord:
    """Build the record of a prompt group.

    Args:
        worker: The prompter.
        group: What is issued.
        choice: The row, and the rows that were skipped for it.
        stream: Where the row is.
        read_messages: Returns a row's messages, whose media are stored.
        lost_worker: The silent worker for which it is issued once more.
    Raises:
        MediaError: A file of the row can't be read.
    """
    worker.heartbeat.advance()  # reading a row's media may take a while
    run = worker.config.run
    required = max(group.slot.train_step - run.max_staleness, 0)
    if group.attempt:
        required = max(
            required, worker.control.policy_version
        )  # a reissue needs newer weights, or it would expire again
    issued = replace(
        build_prompt_group(run, group, choice, stream=stream, read_messages=read_messages),
        required_policy_version=required,
        lost_worker=lost_worker,
    )
    partition = compute_shard(group.prompt_group_id, shards=worker.plan.queue_partitions)
    return worker.records.build(
        PROMPT_GROUPS, issued, key=group.prompt_group_id, partition=partition
    )


def build_prompt_group(
    run: RunSection,
    group: IssuedGroup,
    choice: SelectedRow,
    *,
    stream: PromptStream,
    read_messages: MessageReader,
) -> PromptGroupIssued:
    """Build a prompt group that any policy version may generate; see `build_prompt_record`."""
    row = stream[group.row]
    return PromptGroupIssued(
        prompt_group_id=group.prompt_group_id,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=group.row,
        required_policy_version=0,
        samples_per_prompt=run.samples_per_prompt,
        messages=read_messages(row),
        answer=row.answer,
        metadata=row.metadata,
        tools=row.tools,
        completions=row.completions,
        skipped_rows={str(number): reason for number, reason in choice.skipped.items()},
        seed=derive_seed(run.seed, group),
    )


def derive_seed(run_seed: int, group: IssuedGroup) -> int:
    """Derive a prompt group's seed from the run's."""
    return (run_seed * 1_000_003 + compute_shard(group.prompt_group_id, shards=2**31)) % 2**53
