"""Builds the records of the queue of prompts."""

from __future__ import annotations

from relax_events.data.prompt_sampler import SelectedRow
from relax_events.data.rows import MessageReader
from relax_events.data.stream import PromptStream
from relax_events.events.types import PromptGroupIssued
from relax_events.kafka.records import ProducerRecord
from relax_events.runtime.worker import Worker
from relax_events.staleness import IssuedGroup
from relax_events.topics import compute_shard
from relax_events.topics.names import PROMPT_GROUPS


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
    run, row = worker.config.run, stream[group.row]
    required = max(group.slot.train_step - run.max_staleness, 0)
    if group.attempt:
        required = max(
            required, worker.control.policy_version
        )  # a reissue needs newer weights, or it would expire again
    issued = PromptGroupIssued(
        prompt_group_id=group.prompt_group_id,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=group.row,
        required_policy_version=required,
        samples_per_prompt=run.samples_per_prompt,
        messages=read_messages(row),
        answer=row.answer,
        metadata=row.metadata,
        tools=row.tools,
        completions=row.completions,
        skipped_rows={str(number): reason for number, reason in choice.skipped.items()},
        seed=derive_seed(run.seed, group),
        lost_worker=lost_worker,
    )
    partition = compute_shard(group.prompt_group_id, shards=worker.plan.queue_partitions)
    return worker.records.build(
        PROMPT_GROUPS, issued, key=group.prompt_group_id, partition=partition
    )


def derive_seed(run_seed: int, group: IssuedGroup) -> int:
    """Derive a prompt group's seed from the run's."""
    return (run_seed * 1_000_003 + compute_shard(group.prompt_group_id, shards=2**31)) % 2**53
