"""The prompter: issues prompt groups, step by step, as policy versions are published.

Admission control is the staleness bound: the prompt groups of step s are issued once version s - max_staleness is out.
A prompt group that ended untrained is issued again or replaced, so that every step gets its batch. What was issued is
read back from the log at the start, and ids are derived, so a prompter may die at any instruction.
"""

from __future__ import annotations

import queue
import time
from contextlib import suppress

import structlog

from relax_events.broker.consumer import LogReader
from relax_events.broker.producer import RecordProducer
from relax_events.broker.records import OutRecord
from relax_events.config import RunConfig
from relax_events.data.sources import open_source
from relax_events.data.stream import PromptStream
from relax_events.errors import CorruptRecord, PoisonSample, SchemaError
from relax_events.events.types import Event, Outcome, PolicyVersionPublished, PromptGroupEnded, PromptGroupIssued
from relax_events.pipeline.failpoints import failpoint
from relax_events.pipeline.validation import check_issued
from relax_events.pipeline.worker import Worker
from relax_events.policy import IssuedGroup, Place, admitted_steps, due_places, is_guest, reissue_of
from relax_events.topics import shard_of
from workers.opening import open_worker

log = structlog.get_logger()
IDLE_SECONDS = 0.5


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    source = open_source(config.data, seed=config.run.seed)
    with open_worker("prompter", config, index=index, follow=("control.group-outcomes",), linger_ms=0) as worker:
        PrompterLoop(worker, PromptStream(source, seed=config.run.seed, shuffle=config.data.shuffle)).run()


class PrompterLoop:
    """Waits for the control log: a published version admits a step, an untrained end frees a seat."""

    def __init__(self, worker: Worker, stream: PromptStream) -> None:
        self._worker, self._stream, self._config = worker, stream, worker.config
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._issued: dict[str, IssuedGroup] = {}
        self._seats: set[Place] = set()
        self._next_row = self._config.source.from_row
        self._next_step = self._config.first_version
        # A record batch for each prompt group, so that a share consumer can lease one at a time.
        self._producer = RecordProducer(worker.connection, one_record_per_batch=True)

    def run(self) -> None:
        """Issue until the drain starts."""
        worker = self._worker
        self._recover()
        worker.drain.on_start(lambda: self._inbox.put(None))
        worker.follow(self._inbox.put)
        while not worker.drain.requested:
            with suppress(queue.Empty):
                self._take(self._inbox.get(timeout=IDLE_SECONDS))
            worker.tick(working=False)
        self._producer.close()

    def _recover(self) -> None:
        """Read back what was issued, and of what retention has deleted from the queue that its seats were trained."""
        reader, plan = LogReader(self._worker.connection), self._worker.plan
        queue = [(plan.topic("prompt.groups"), partition) for partition in range(plan.queue_partitions)]
        for record in reader.read_to_end([*queue, (plan.topic("control.group-outcomes"), 0)]):
            with suppress(CorruptRecord, PoisonSample, SchemaError):  # a stranger's record, which the rollout role keeps among its dead letters
                event = self._worker.codec.decode(record.value)
                if isinstance(event, PromptGroupIssued) and not is_guest(check_issued(event).prompt_group_id):
                    self._remember(IssuedGroup(Place(event.train_step, event.group_index), event.attempt, event.row))
                elif isinstance(event, PromptGroupEnded) and event.outcome is Outcome.TRAINED:
                    self._seats.add(Place(event.train_step, event.group_index))
        reader.close()
        if self._issued:
            log.info("prompts.recovered", num_prompt_groups=len(self._issued), next_row=self._next_row)

    def _remember(self, group: IssuedGroup) -> None:
        self._issued[group.prompt_group_id] = group
        self._seats.add(group.place)
        self._next_row = max(self._next_row, group.row + 1)

    def _take(self, event: Event | None) -> None:
        if isinstance(event, PolicyVersionPublished):
            self._admit(event.policy_version)
        elif isinstance(event, PromptGroupEnded):
            self._replace(event)

    def _admit(self, published_version: int) -> None:
        """Issue every seat of the admitted steps that is still empty."""
        run = self._config.run
        steps = admitted_steps(published_version, max_staleness=run.max_staleness, num_steps=run.num_steps)
        new_steps = range(self._next_step, steps.stop)
        places = due_places(self._seats, steps=new_steps, groups_per_step=run.groups_per_step)
        self._issue([IssuedGroup(place, 0, self._next_row + number) for number, place in enumerate(places)])
        self._next_step = max(self._next_step, steps.stop)

    def _replace(self, event: PromptGroupEnded) -> None:
        ended = self._issued.get(event.prompt_group_id)
        if ended is None or event.outcome is Outcome.TRAINED:
            return
        successor = reissue_of(ended, outcome=event.outcome, next_row=self._next_row)
        if successor is not None and successor.prompt_group_id not in self._issued:
            self._issue([successor])

    def _issue(self, groups: list[IssuedGroup]) -> None:
        if not groups:
            return
        started = time.monotonic()
        self._producer.write(self._record(group) for group in groups)
        failpoint("prompter.after_issue")
        for group in groups:
            self._remember(group)
        self._worker.finished(len(groups), started)
        log.info("prompt_groups.issued", num_prompt_groups=len(groups), first=groups[0].prompt_group_id, last=groups[-1].prompt_group_id)

    def _record(self, group: IssuedGroup) -> OutRecord:
        run, row = self._config.run, self._stream[group.row]
        required = max(group.place.train_step - run.max_staleness, 0)
        if group.attempt:
            required = max(required, self._worker.control.policy_version)  # a late comer starts on fresh weights, or it would expire again
        issued = PromptGroupIssued(
            prompt_group_id=group.prompt_group_id,
            train_step=group.place.train_step,
            group_index=group.place.group_index,
            attempt=group.attempt,
            row=group.row,
            required_policy_version=required,
            samples_per_prompt=run.samples_per_prompt,
            messages=row.messages,
            answer=row.answer,
            metadata=row.metadata,
            seed=seed_of(run.seed, group),
        )
        partition = shard_of(group.prompt_group_id, shards=self._worker.plan.queue_partitions)
        return self._worker.outbound("prompt.groups", issued, key=group.prompt_group_id, partition=partition)


def seed_of(run_seed: int, group: IssuedGroup) -> int:
    """Derive a prompt group's seed from the run's."""
    return (run_seed * 1_000_003 + shard_of(group.prompt_group_id, shards=2**31)) % 2**53
