"""Turns leases into prompt groups in flight: decodes and checks the record, renders the prompt,
resumes stored samples, and fails prompt groups that can't be generated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing, suppress

from relax_events.data.rendering import PromptRenderer
from relax_events.data.sft_targets import tokenize_group_targets
from relax_events.errors import CorruptRecord, ForeignRecord, PoisonSample
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupIssued
from relax_events.kafka.admin import Admin
from relax_events.kafka.lease_sources import open_lease_source
from relax_events.kafka.leases import (
    DEFAULT_DELIVERY_LIMIT,
    Lease,
    LeaseSource,
    read_delivery_limit,
    read_share_group_size,
)
from relax_events.objects.store import list_message_media
from relax_events.roles.handover import PartialSamples
from relax_events.roles.inflight_group import InflightGroup
from relax_events.roles.media_prefetch import MediaPrefetcher
from relax_events.runtime.issue_rules import IssueRules
from relax_events.runtime.validation import check_issued
from relax_events.runtime.worker import Worker
from relax_events.topics.names import PROMPT_GROUPS

MAX_DELIVERIES = 8
DELIVERY_MARGIN = 2
"""The broker silently drops a record at its delivery limit, so the worker fails it earlier."""


class PromptIntake:
    """Opens the queue of prompt groups, and turns leases into prompt groups in flight."""

    def __init__(
        self,
        worker: Worker,
        renderer: PromptRenderer,
        *,
        partials: PartialSamples,
        prefetcher: MediaPrefetcher,
    ) -> None:
        self._worker, self._config, self._renderer = worker, worker.config, renderer
        self._partials, self._prefetcher = partials, prefetcher
        self._rules = IssueRules.from_config(worker.config)
        self.max_deliveries = MAX_DELIVERIES

    def open_leases(self, on_lease: Callable[[Lease], None]) -> LeaseSource:
        """Open the queue of prompt groups; `on_lease` is called from other threads."""
        plan, broker = self._worker.plan, self._config.broker
        group = plan.consumer_group("rollout")
        size = None
        if broker.prompt_queue == "share_group":
            with closing(Admin(self._worker.connection)) as admin:
                size = read_share_group_size(admin)
            limit = read_delivery_limit(self._worker.connection, group)
            self.max_deliveries = (
                limit if limit <= DEFAULT_DELIVERY_LIMIT else limit - DELIVERY_MARGIN
            )
        lanes = self._config.plan_lanes(size)
        return open_lease_source(
            broker.prompt_queue,
            self._worker.connection,
            group=group,
            topic=plan.topic(PROMPT_GROUPS),
            max_leases=self._config.num_lanes,
            first_lanes=lanes.first,
            most_lanes=lanes.most,
            on_lease=on_lease,
        )

    def render(self, lease: Lease, issued: PromptGroupIssued) -> InflightGroup:
        """Render a prompt and start to fetch its media; resume samples that another worker stored.

        Raises:
            PoisonSample, ValueError: The prompt can't be rendered.
        """
        answers = (
            ()
            if self._config.algorithm.has_rewards
            else tokenize_group_targets(issued, renderer=self._renderer)
        )
        prompt_tokens = self._renderer.row_tokens(issued.messages, tools=issued.tools)
        group = InflightGroup([lease], issued, prompt_tokens, answers)
        if (
            lease.delivery_count > 1 or self._config.broker.prompt_queue == "consumer_group"
        ):  # a lease source that does not count deliveries
            group.resume(
                self._partials.find(issued.prompt_group_id, num_samples=issued.samples_per_prompt)
            )
        shown = [
            reference
            for sample in group.partials.values()
            for reference in list_message_media(sample.turns)
        ]
        group.media = self._prefetcher.prefetch([*list_message_media(issued.messages), *shown])
        return group

    def take(self, lease: Lease) -> PromptGroupIssued | None:
        """Decode and check. An invalid record becomes a dead letter, and its prompt group fails;
        where the prompter of this run does not write such a record, the prompt group that it names
        may be a valid one, and continues.
        """
        event = self._worker.records.decode(lease.record)
        try:
            if event is not None:
                issued = check_issued(event)
                self._rules.check_prompt(issued)
                return issued
        except ForeignRecord as error:
            self._worker.records.dead_letter(lease.record, error)
            lease.done()
            return None
        except PoisonSample as error:
            self._worker.records.dead_letter(lease.record, error)
        self.end(lease, Outcome.FAILED, "prompt record is unusable")
        return None

    def end(self, lease: Lease, outcome: Outcome, reason: str) -> None:
        """End a prompt group that can't be or need not be generated, and remove it from the
        queue.
        """
        # a record of an unknown producer belongs to no prompt group: a dead letter is enough
        with suppress(CorruptRecord):
            self._worker.records.producer.send(
                self._worker.records.build_end_request(lease.record.key, outcome, reason)
            )
        self._worker.records.producer.flush()
        lease.done()

    def end_groups(self, groups: Collection[InflightGroup], outcome: Outcome, reason: str) -> None:
        """End prompt groups together that need not be generated, and remove them from the queue."""
        for group in groups:
            self._worker.records.producer.send(
                self._worker.records.build_end_request(
                    group.issued.prompt_group_id, outcome, reason
                )
            )
        self._worker.records.producer.flush()
        for group in groups:
            group.trace.end(error=reason)
            group.done()
        self._partials.forget(group.issued.prompt_group_id for group in groups if group.is_resumed)

    def give_up(self, lease: Lease) -> None:
        """Fail a prompt group that was delivered too often."""
        self.end(
            lease,
            Outcome.FAILED,
            (
                f"failed at delivery {lease.delivery_count}: the workers that leased it "
                "crashed or were stopped"
            ),
        )
