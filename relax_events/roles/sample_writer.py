"""Writes the samples of finished prompt groups, and settles their leases once the broker has
acknowledged them, while the engine generates on.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from contextlib import suppress
from functools import partial

import structlog

from relax_events.data.rendering import PromptRenderer
from relax_events.errors import EpisodeFailed
from relax_events.events.generations import mark_generation
from relax_events.events.parts import FinishReason, Outcome
from relax_events.kafka.records import ProducerRecord
from relax_events.roles.handover import PartialSamples
from relax_events.roles.inflight_group import (
    LOST,
    MAX_ERROR_CHARACTERS,
    InflightGroup,
    build_sample_event,
)
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.topics.names import ROLLOUT_SAMPLES

log = structlog.get_logger()
MAX_REMEMBERED_GROUPS = 1024
ENDINGS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.LATE, FinishReason.LOST)
NUM_PARTS = 8
"""Of a train step: smaller parts of its prompt groups wait for others."""


class SampleWriter:
    """The finished prompt groups of a rollout worker. Used by the worker's loop alone.

    An engine in the worker's process stands still while the loop waits for the broker, so `send`
    does not wait; `flush` is for when the engine has nothing to do.
    """

    def __init__(self, worker: Worker, renderer: PromptRenderer, partials: PartialSamples) -> None:
        self._worker, self._renderer, self._partials = worker, renderer, partials
        worker.metrics.count_generated(dict.fromkeys(ENDINGS, 0))  # else no increase to 1 is seen
        self._acknowledged: queue.SimpleQueue[InflightGroup] = queue.SimpleQueue()
        self._num_lingering = 0
        """Prompt groups whose records may wait in the producer for others of their batch."""
        self.sent: dict[str, InflightGroup] = {}
        """Prompt groups whose samples are not all acknowledged, by their ids; a lease that is
        delivered again joins its prompt group's leases."""
        self.written: deque[str] = deque(maxlen=MAX_REMEMBERED_GROUPS)
        """Ids of the prompt groups settled last, newest at the end: the broker delivers one again
        if it missed the settlement."""

    def send(self, groups: list[InflightGroup], started: float) -> None:
        """Send samples; their leases are settled once they are acknowledged, while the engine works
        on.
        """
        for group in groups:
            prompt_group_id = group.issued.prompt_group_id
            failure = group.find_failure(self._worker.config.algorithm)
            if failure and self._worker.config.environment.has_episodes:
                self._worker.records.dead_letter(group.leases[0].record, EpisodeFailed(failure))
                self._worker.records.flush_dead_letters()
            if group.lost:
                log.warning(
                    "samples.lost",
                    prompt_group_id=prompt_group_id,
                    num_samples=len(group.lost),
                    error=group.lost[0].error[:MAX_ERROR_CHARACTERS],
                )
            *others, last = self._end(prompt_group_id, failure) if failure else self._records(group)
            for record in others:
                self._worker.records.producer.send(record)
            # all are of one partition, so the last one is acknowledged last
            self.sent[prompt_group_id] = group
            self._worker.records.producer.send(
                last, on_acknowledged=partial(self._acknowledged.put, group)
            )
        failpoint("rollout.before_flush")
        self._end_linger(len(groups))
        reasons = [sample.finish_reason for group in groups for sample in group.samples]
        endings: Counter[str] = Counter(
            FinishReason.LOST if one in LOST else one for one in reasons
        )
        self._worker.metrics.count_generated(endings)
        self._worker.metrics.count_tokens(
            sum(sample.num_sampled_tokens for group in groups for sample in group.samples)
        )
        self._worker.lifecycle.record_processed(len(groups), started)

    def _end_linger(self, num_groups: int) -> None:
        """Let a part of a step's prompt groups wait for no others on-policy: until they come, the
        other roles have nothing to do.
        """
        self._num_lingering += num_groups
        run = self._worker.config.run
        if run.max_staleness == 0 and self._num_lingering >= run.prompts_per_step // NUM_PARTS:
            self._worker.records.producer.end_linger()
            self._num_lingering = 0

    def flush(self) -> None:
        """Wait until all samples are acknowledged, and settle their leases."""
        if self.sent:
            self._worker.records.producer.flush()
            self._num_lingering = 0
            self._settle()

    def settle_acknowledged(self) -> None:
        """Settle the leases of the prompt groups that were acknowledged meanwhile."""
        if self.sent:
            self._worker.records.producer.check()
            self._settle()

    def _settle(self) -> None:
        settled = []
        with suppress(queue.Empty):
            while True:
                settled.append(self._acknowledged.get_nowait())
        if not settled:
            return
        failpoint("rollout.before_settle")
        for group in settled:
            del self.sent[group.issued.prompt_group_id]
            self.written.append(group.issued.prompt_group_id)
            group.done()
            group.end_trace()
        self._partials.forget(group.issued.prompt_group_id for group in settled if group.is_resumed)

    def _end(self, prompt_group_id: str, failure: str) -> list[ProducerRecord]:
        return [self._worker.records.build_end_request(prompt_group_id, Outcome.FAILED, failure)]

    def _records(self, group: InflightGroup) -> list[ProducerRecord]:
        owner = group.policy_versions[0]
        samples = [
            build_sample_event(
                group,
                sample,
                owner=owner,
                config=self._worker.config,
                renderer=self._renderer,
                worker_id=self._worker.worker_id,
            )
            for sample in group.samples
        ]
        mark_generation(samples)
        return self._worker.records.build_for_samples(ROLLOUT_SAMPLES, samples)
