"""The prompter: issues prompt groups, step by step, as policy versions are published.

Admission control is the staleness bound: the prompt groups of step s are issued once version
s - max_staleness is published. A prompt group that ended untrained is issued again or replaced, so
that every step gets its batch. The prompter may crash at any instruction: at its start it reads
back from the log which prompt groups it issued and which rows it skipped, and ids are derived.

Prompt groups of a rollout worker whose heartbeats have ended are issued once more, under the same
ids: the broker may keep the worker's leases for long (see `projections/held_groups.py`).

A step trains the first prompt groups of its batch slots that can be trained. Where some can't, as
many more are issued ahead as the last steps needed, so that the step does not wait for one
replacement after another. Rows behind the last trained slot are issued again for a later step.

With filters that depend on past rewards, step s waits until all outcomes of step s-1 are read, and
a batch slot is refilled once the outcome that freed it is read. So every choice depends on a prefix
of control.prompt-group-outcomes only, and a restarted prompter repeats it.

    control.policy-versions, control.prompt-group-outcomes
      ──▶ choose, in the order of the log, until nothing is left to read
      ──▶ issue all prompt groups that are due ──▶ prompt.groups

A run has one prompter: a second one takes over, and continues behind what the first has issued.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import structlog

from relax_events.config import RunConfig
from relax_events.data.prompt_filter import (
    PromptFilter,
    build_filters,
    needs_history,
    needs_token_counts,
)
from relax_events.data.prompt_sampler import PromptSampler, SelectedRow
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import MessageReader, build_storing_reader, plain_messages
from relax_events.data.sources import open_stream
from relax_events.data.stream import PromptStream
from relax_events.errors import MediaError
from relax_events.events.parts import Outcome
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PrompterStateSaved,
    PromptGroupEnded,
    PromptGroupIssued,
    WorkerHeartbeat,
)
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import ProducerRecord
from relax_events.media.library import MediaLibrary
from relax_events.projections.held_groups import HeldPromptGroups
from relax_events.roles.prompt_records import (
    PromptQueue,
    build_prompt_record,
)
from relax_events.roles.prompter_state import (
    MAX_SUMMARY_REWARDS,
    build_summary,
    read_newest_summary,
    saved_groups,
    saved_positions,
    saved_rewards,
)
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.staleness import (
    BatchSlot,
    BatchSupply,
    IssuedGroup,
    OrderedSupply,
    ReadySupply,
    admitted_steps,
)
from relax_events.telemetry.traces import TracedWork
from relax_events.topics.names import GROUP_OUTCOMES, HEARTBEATS, PROMPT_GROUPS
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
IDLE_SECONDS = 0.5
QUEUE, ENDS = PROMPT_GROUPS, GROUP_OUTCOMES
HELD = HEARTBEATS["rollout"]
SUMMARY_STEPS = 8
"""Number of admitted train steps between two summaries."""
MAX_PART_BYTES, PART_SECONDS = 16 * 1024**2, 1.0
"""Prompt groups are issued in parts of this size, or of what is built in this time: rollout workers
generate the first of a step while media of the others are read."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    stream = open_stream(config.data, seed=config.run.seed)
    store = open_store(config)
    renderer = (
        PromptRenderer.from_folder(
            config.model.path,
            config.data,
            media=config.model.media,
            tool_format=config.environment.tool_call_format,
        )
        if needs_token_counts(config.data)
        else None
    )
    read_messages = build_storing_reader(MediaLibrary(config, store=store))
    filters = build_filters(config.data, renderer=renderer, read_messages=read_messages)
    with open_worker("prompter", config, index=index, store=store, follow=(ENDS, HELD)) as worker:
        PrompterLoop(worker, stream, filters, read_messages=read_messages).run()


class DueGroup(NamedTuple):
    """A prompt group that is chosen and not issued yet; once more, if a worker lost it."""

    group: IssuedGroup
    choice: SelectedRow
    lost_worker: str = ""
    instead_of: str = ""
    """The prompt group that it replaces."""


class PrompterLoop:
    """Waits for the control log: a published version admits a step, an untrained end frees a
    batch slot.
    """

    def __init__(
        self,
        worker: Worker,
        stream: PromptStream,
        filters: Sequence[PromptFilter] = (),
        *,
        read_messages: MessageReader = plain_messages,
    ) -> None:
        self._worker, self._stream, self._config = worker, stream, worker.config
        self._messages_of = read_messages
        self._inbox: queue.SimpleQueue[tuple[Event | None, int]] = queue.SimpleQueue()
        self._in_flight: dict[str, IssuedGroup] = {}
        run = self._config.run
        size, first_step = run.prompts_per_step, self._config.first_version
        self._supply: BatchSupply = (
            OrderedSupply(
                prompts_per_step=size,
                first_step=first_step,
                returns_filtered=run.max_staleness == 0,
            )
            if run.sample_order == "fifo"
            else ReadySupply(prompts_per_step=size, first_step=first_step)
        )
        self._published, self._takes_spares = -1, False
        self._early_ends: list[PromptGroupEnded] = []
        """Outcomes that came before the first policy version."""
        self._next_step = self._summed_step = self._config.first_version
        self._ends_position = 0
        self._needs_history = needs_history(self._config.data)
        self._sampler = PromptSampler(
            stream,
            filters,
            block_rows=self._config.data.filter_window_rows
            if self._config.data.prompt_filter
            else 1,
            first_row=self._config.parent.from_row,
            heartbeat=self._send_heartbeat,
        )
        self._held = HeldPromptGroups()
        self._due: list[DueGroup] = []
        self._queue = PromptQueue(worker)

    def run(self) -> None:
        """Issue until the drain starts.

        Raises:
            Fenced: Another prompter took over.
        """
        worker = self._worker
        self._recover()
        worker.drain.on_start(lambda: self._inbox.put((None, 0)))
        worker.control.follow(self._put, start_offsets={ENDS: self._ends_position})
        while not worker.drain.requested:
            self._take_all()
            self._choose_lost()
            self._issue_due()
            self._write_summary()
            worker.lifecycle.tick(working=False)
        self._queue.close()

    def _take_all(self) -> None:
        """Wait for an event, and take all that have arrived: what they make due is issued at
        once.
        """
        with suppress(queue.Empty):
            self._take(*self._inbox.get(timeout=IDLE_SECONDS))
            for _ in range(self._inbox.qsize()):
                self._take(*self._inbox.get_nowait())

    def _send_heartbeat(self) -> None:
        self._worker.heartbeat.advance()  # a block of rows was filtered
        self._worker.lifecycle.tick(working=True)

    def _put(self, event: Event) -> None:
        """Queue an event from the control log's thread, with the next offset of
        control.prompt-group-outcomes.
        """
        self._inbox.put((event, self._worker.control.follower.position(ENDS)))

    def _recover(self) -> None:
        """Take over, restore the newest summary, and read back what was issued since.

        Without a summary the whole queue is read. For prompt groups that retention has deleted from
        it, their outcomes show which batch slots were trained.
        """
        reader, plan = LogReader(self._worker.connection), self._worker.plan
        summary = read_newest_summary(reader, self._worker)
        self._queue.claim(summary or self._summarise({}))
        failpoint("prompter.after_claim")
        begins = {} if summary is None else saved_positions(summary, plan)
        is_restored = False
        if summary is not None:
            is_restored = self._restore_summary(summary)
            self._ends_position = begins.get((plan.topic(ENDS), 0), 0)
        self._recover_issued(
            reader,
            {
                (plan.topic(QUEUE), partition): begins.get((plan.topic(QUEUE), partition), 0)
                for partition in range(plan.queue_partitions)
            },
        )
        # Read after the queue: a prompt group may be purged from it while it is read, and its
        # outcome was written before.
        first_end = self._ends_position if is_restored else 0
        self._supply.recover(self._read_trained(reader, first_end))
        reader.close()
        if self._in_flight or summary is not None:
            log.info(
                "prompts.recovered",
                num_prompt_groups=len(self._in_flight),
                next_row=self._sampler.floor,
            )

    def _recover_issued(self, reader: LogReader, begins: Mapping[TopicPartition, int]) -> None:
        """Read the queue. Where its first records are purged, also while it is read, all rows
        before the first record that is left were issued.
        """
        rows: dict[TopicPartition, list[tuple[int, int]]] = {at: [] for at in begins}
        ranges = {at: (begin, reader.watermarks(*at)[1]) for at, begin in begins.items()}
        self._queue.know({at: end for at, (_, end) in ranges.items()})
        for record in reader.stream(ranges):
            event = self._queue.decode(record)
            if isinstance(event, PromptGroupIssued):
                self._remember_issue(event)
                if not event.attempt:
                    rows[record.topic, record.partition].append((record.offset, event.row))
        for at, read in rows.items():
            low = reader.watermarks(*at)[0]
            if read and low > begins[at]:
                left = (row for offset, row in read if offset >= low)
                self._sampler.skip_to_block(next(left, read[-1][1]))

    def _read_trained(self, reader: LogReader, begin: int) -> Iterator[tuple[BatchSlot, bool]]:
        """Yield the trained batch slots, and whether the summary has them: such a slot was issued,
        also where its record is purged.
        """
        outcomes = (self._worker.plan.topic(ENDS), 0)
        for record in reader.stream({outcomes: (begin, reader.watermarks(*outcomes)[1])}):
            event = self._queue.decode(record)
            if isinstance(event, PromptGroupEnded) and event.outcome is Outcome.TRAINED:
                slot = BatchSlot(event.train_step, event.group_index)
                yield slot, record.offset < self._ends_position

    def _restore_summary(self, summary: PrompterStateSaved) -> bool:
        """Return whether earlier outcomes are not needed."""
        self._next_step = self._summed_step = summary.next_step
        self._sampler.resume_at(summary.next_row, summary.later_rows)
        self._in_flight = saved_groups(summary)
        for row, reward in saved_rewards(summary):
            self._sampler.history.add(row, reward)
        return self._supply.restore(summary)

    def _write_summary(self) -> None:
        """Write a summary periodically, so that the cost of a restart does not grow with the run.

        All prompt groups issued so far are acknowledged, and all outcomes up to the written offset
        are applied.
        """
        is_due = self._next_step >= self._summed_step + SUMMARY_STEPS
        if not is_due or not self._supply.is_between_steps:
            return
        self._summed_step = self._next_step
        num_earned = sum(1 for _ in self._sampler.history.entries())
        if num_earned > MAX_SUMMARY_REWARDS:
            log.warning(
                "prompter_state.save_failed", num_earned=num_earned, limit=MAX_SUMMARY_REWARDS
            )
            return
        self._look()
        outcomes = (self._worker.plan.topic(ENDS), 0)
        self._queue.save(self._summarise(self._queue.ends | {outcomes: self._ends_position}))

    def _summarise(self, positions: Mapping[TopicPartition, int]) -> PrompterStateSaved:
        return build_summary(
            self._sampler,
            positions=positions,
            next_step=self._next_step,
            in_flight=self._in_flight,
            supply=self._supply,
            rewards=list(self._sampler.history.entries()),
        )

    def _look(self) -> frozenset[str]:
        """Learn what another prompter has issued; return the ids."""
        issued = self._queue.look()
        for event in issued:
            self._remember_issue(event)
        return frozenset(event.prompt_group_id for event in issued)

    def _remember_issue(self, event: PromptGroupIssued) -> None:
        skipped_rows = [int(row) for row in event.skipped_rows if row.isdecimal()]
        self._remember(
            IssuedGroup(BatchSlot(event.train_step, event.group_index), event.attempt, event.row),
            skipped_rows,
        )

    def _remember(self, group: IssuedGroup, skipped_rows: Iterable[int]) -> None:
        self._in_flight[group.prompt_group_id] = group
        self._supply.add(group)
        for row in (group.row, *skipped_rows):
            self._sampler.mark_used(row)

    def _take(self, event: Event | None, ends_position: int) -> None:
        self._ends_position = max(self._ends_position, ends_position)
        if isinstance(event, PolicyVersionPublished):
            self._apply_version(event)
        elif isinstance(event, PromptGroupEnded):
            if self._published < 0:
                self._early_ends.append(event)
            else:
                self._apply_end(event)
        elif isinstance(event, WorkerHeartbeat):
            self._held.apply(event, now=time.monotonic())

    def _choose_lost(self) -> None:
        """Choose the prompt groups that silent rollout workers hold, to be issued once more."""
        now = time.monotonic()
        if self._worker.lifecycle.is_broker_away:
            self._held.postpone(now=now)
        lost = self._held.take_lost(
            now=now,
            silent_seconds=self._config.workers.silent_seconds,
            awaited=self._in_flight.keys(),
        )
        for worker_id, names in lost.items():
            log.warning("prompt_groups.lost", holder=worker_id, num_prompt_groups=len(names))
            groups = [self._in_flight[name] for name in names]
            readable = [group for group in groups if self._is_readable(group.row)]
            self._due += [DueGroup(group, SelectedRow(group.row), worker_id) for group in readable]

    def _apply_end(self, event: PromptGroupEnded) -> None:
        ended = self._in_flight.pop(event.prompt_group_id, None)
        if (
            ended is not None
            and event.mean_reward is not None
            and event.outcome in (Outcome.TRAINED, Outcome.FILTERED)
        ):
            self._sampler.add_reward(ended.row, event.mean_reward)
        if event.outcome is Outcome.TRAINED:
            self._apply_trained(event)
        elif ended is not None:
            self._choose_successors(ended, event.outcome)

    def _apply_version(self, event: PolicyVersionPublished) -> None:
        self._published = max(self._published, event.policy_version)
        self._takes_spares = event.takes_spares
        if not self._needs_history or event.policy_version == self._config.first_version:
            self._choose_admitted(event.policy_version)
        early, self._early_ends = self._early_ends, []
        for ended in early:
            self._apply_end(ended)

    def _apply_trained(self, event: PromptGroupEnded) -> None:
        slot = BatchSlot(event.train_step, event.group_index)
        version = self._supply.train(slot, trainer_version=event.trainer_version)
        if version is None:
            return
        self._in_flight = {
            name: group
            for name, group in self._in_flight.items()
            if group.slot.train_step >= self._supply.open_step
        }
        self._choose_admitted(version if self._needs_history else self._published)

    def _choose_admitted(self, published_version: int) -> None:
        """Choose a prompt group for every empty batch slot of the admitted steps. With spares, a
        step waits for the outcomes of the one that made its oldest allowed version.
        """
        run, uses_spares = self._config.run, self._takes_spares
        version = self._supply.bound_version(published_version, uses_spares=uses_spares)
        steps = admitted_steps(version, max_staleness=run.max_staleness, num_steps=run.num_steps)
        slots = [
            (slot, 0)
            for step in range(self._supply.first_step, steps.stop)
            for slot in self._supply.find_empty_slots(step, uses_spares=uses_spares)
        ]
        self._choose(self._select(slots, steps))
        self._next_step = max(self._next_step, steps.stop)

    def _select(
        self, slots: Sequence[tuple[BatchSlot, int]], steps: range, *, instead_of: str = ""
    ) -> list[DueGroup]:
        """Give each batch slot and attempt a row: first those of spares that were not trained."""
        returned = []
        for row in self._supply.take_returned_rows(len(slots)):
            returned += [SelectedRow(row)] if self._is_readable(row) else []
        new = self._sampler.next_rows(len(slots) - len(returned), train_step=max(steps.stop - 1, 0))
        return [
            DueGroup(IssuedGroup(slot, attempt, choice.row), choice, instead_of=instead_of)
            for (slot, attempt), choice in zip(slots, [*returned, *new], strict=True)
        ]

    def _choose_successors(self, ended: IssuedGroup, outcome: Outcome) -> None:
        """Choose what replaces an untrained prompt group."""
        former = ended.prompt_group_id
        self._supply.end(ended, outcome)
        slots = [
            (slot, attempt)
            for slot, attempt in self._supply.find_replacements(
                ended, outcome, uses_spares=self._takes_spares
            )
            if IssuedGroup(slot, attempt, -1).prompt_group_id not in self._in_flight
        ]
        if slots and outcome is Outcome.EXPIRED and self._is_readable(ended.row):
            again = replace(ended, attempt=ended.attempt + 1)
            self._choose([DueGroup(again, SelectedRow(ended.row), instead_of=former)])
        else:
            steps = range(ended.slot.train_step + 1)
            self._choose(self._select(slots, steps, instead_of=former))

    def _choose(self, due: Iterable[DueGroup]) -> None:
        """Note prompt groups as due. They count as issued from now on: if they are not, this
        process has ended, and its successor reads the log.
        """
        for one in due:
            self._due.append(one)
            self._remember(one.group, one.choice.skipped)

    def _is_readable(self, row: int) -> bool:
        """Return whether a row can be issued again: its media files may have been deleted."""
        self._worker.heartbeat.advance()  # reading them may take a while
        try:
            self._messages_of(self._stream[row])
        except MediaError as error:
            log.warning("row.failed", row=row, reason=error.reason, error=str(error))
            return False
        return True

    def _issue_due(self) -> None:
        """Issue all chosen prompt groups."""
        due, self._due = self._due, []
        lease_size = self._config.prompt_groups_per_lease(num_workers=self._count_rollout_workers())
        parts = self._build_parts(due, lease_size=lease_size)
        while True:
            started = time.monotonic()
            with self._worker.lifecycle.piece("issue prompt groups"):
                if (part := next(parts, None)) is None:
                    return
                self._issue(part, lease_size=lease_size)
            self._worker.lifecycle.record_processed(len(part), started)

    def _build_parts(
        self, due: Iterable[DueGroup], *, lease_size: int
    ) -> Iterator[list[tuple[DueGroup, ProducerRecord]]]:
        """Build the records of prompt groups, and yield them in parts of whole leases."""
        part: list[tuple[DueGroup, ProducerRecord]] = []
        num_bytes, started = 0, time.monotonic()
        for one in due:
            record = self._record(one)
            part.append((one, record))
            num_bytes += len(record.value or b"")
            is_full = num_bytes > MAX_PART_BYTES or time.monotonic() - started > PART_SECONDS
            if is_full and len(part) % lease_size == 0:
                yield part
                part, num_bytes, started = [], 0, time.monotonic()
        if part:
            yield part

    def _issue(self, part: Iterable[tuple[DueGroup, ProducerRecord]], *, lease_size: int) -> None:
        """Issue a part, without what another prompter has issued meanwhile."""
        issued = self._look()
        part = [
            (one, record)
            for one, record in part
            if one.lost_worker or one.group.prompt_group_id not in issued
        ]
        if not part:
            return
        failpoint("prompter.before_issue")
        issuing = [self._begin_trace(one) for one, _ in part]
        records = [
            replace(record, headers={**record.headers, **work.headers})
            for (_, record), work in zip(part, issuing, strict=True)
        ]
        self._queue.issue(records, max_batch_records=lease_size)
        for work in issuing:
            work.end()
        failpoint("prompter.after_issue")
        skipped_rows = Counter(reason for one, _ in part for reason in one.choice.skipped.values())
        log.info(
            "prompt_groups.issued",
            num_prompt_groups=len(part),
            first=part[0][0].group.prompt_group_id,
            last=part[-1][0].group.prompt_group_id,
            skipped_rows=dict(skipped_rows),
        )

    def _count_rollout_workers(self) -> int:
        return self._held.count_workers(
            now=time.monotonic(), silent_seconds=self._config.workers.silent_seconds
        )

    def _begin_trace(self, due: DueGroup) -> TracedWork:
        group = due.group
        return self._worker.records.traces.begin_group(
            group.prompt_group_id,
            topic=PROMPT_GROUPS,
            instead_of=due.instead_of,
            train_step=group.slot.train_step,
            attempt=group.attempt,
            row=group.row,
        )

    def _record(self, due: DueGroup) -> ProducerRecord:
        return build_prompt_record(
            self._worker,
            due.group,
            due.choice,
            stream=self._stream,
            read_messages=self._messages_of,
            lost_worker=due.lost_worker,
        )
