"""The rollout role: leases prompt groups, generates their samples, writes them, settles the leases.

Three sources put items into one inbox: the share consumers (a lease), the control log (a new
version) and the drain. The loop waits for the inbox while the engine is idle, and for the engine
while it generates. A lease is settled only after the broker has acknowledged all samples of its
prompt group, so a crashed worker loses time and no prompts.
"""

from __future__ import annotations

import queue
import time
from contextlib import closing
from itertools import islice

import structlog

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import Engine
from relax_events.errors import PoisonSample
from relax_events.events.parts import Outcome
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.kafka.leases import Lease, LeaseSource
from relax_events.media.library import MediaLibrary
from relax_events.roles.engine_factory import bound_engine_rows, open_rollout_engine
from relax_events.roles.engine_monitor import EngineMonitor
from relax_events.roles.engine_turns import EngineTurns
from relax_events.roles.handover import PartialSamples
from relax_events.roles.inflight_group import InflightGroup, build_generation_request
from relax_events.roles.media_prefetch import MediaPrefetcher
from relax_events.roles.prompt_intake import DELIVERY_MARGIN, PromptIntake
from relax_events.roles.redelivery import RedeliveryGuard
from relax_events.roles.sample_writer import SampleWriter
from relax_events.roles.weight_updater import WeightUpdater
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.staleness import (
    choose_submissions,
    count_spare_leases,
    describe_left,
    is_external,
    may_submit,
)
from relax_events.telemetry.traces import TracedWork
from relax_events.topics.names import PROMPT_GROUPS
from relax_events.weights.factory import open_weights_reader
from relax_events.weights.transport import WeightsReader

log = structlog.get_logger()
IDLE_SECONDS = 0.5
STEP_SECONDS = 0.25
SETTLE_SECONDS = 0.005
"""The longest call of the engine while samples wait for their acknowledgement: until then no other
prompt group takes the place of theirs."""
FINISHING_RATIO = 0.75
"""Share of the drain's deadline for finishing running prompt groups; the rest is for storing
unfinished samples."""
NUM_REPORTED_GROUPS = 64


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    with open_worker("rollout", config, index=index, store=store) as worker:
        versions, turns = worker.control, EngineTurns(worker)
        if worker.drain.requested:
            return
        engine = open_rollout_engine(
            bound_engine_rows(config),
            name=config.rollout_engine,
            metrics=worker.metrics,
            newest_version=lambda: versions.policy_version,
            index=index,
        )
        try:
            with closing(open_weights_reader(worker, store)) as transport:
                library = MediaLibrary(config, store=store)
                RolloutLoop(worker, engine, transport, library=library, turns=turns).run()
        finally:
            engine.close()


class RolloutLoop:
    """See the module's docstring."""

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        transport: WeightsReader,
        *,
        library: MediaLibrary | None = None,
        turns: EngineTurns | None = None,
    ) -> None:
        self._turns = turns or EngineTurns(worker)
        self._turns.call_on_begin(lambda: self._put(None))
        self._worker, self._engine, self._transport = worker, engine, transport
        self._config = worker.config
        self._library = library or MediaLibrary(self._config)
        self._prefetcher = MediaPrefetcher(
            MediaLibrary(self._config), on_arrival=lambda: self._put(None)
        )
        self._renderer = PromptRenderer.from_folder(
            self._config.model.path,
            self._config.data,
            media=self._config.model.media,
            tool_format=self._config.environment.tool_call_format,
        )
        self._inbox: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._waiting: dict[str, InflightGroup] = {}
        self._running: dict[str, InflightGroup] = {}
        self._partials = PartialSamples(open_store(self._config))
        self._writer = SampleWriter(worker, self._renderer, self._partials)
        self._redelivery_guard = RedeliveryGuard(worker)
        self._monitor = EngineMonitor(worker, engine)
        self._weights = WeightUpdater(worker, engine, transport, self._monitor)
        self._intake = PromptIntake(
            worker, self._renderer, partials=self._partials, prefetcher=self._prefetcher
        )
        self._asleep = False
        self._num_spare_leases = 0
        self._leaves_when_idle = self._config.run.mode == "sync" or self._turns.are_taken

    def run(self) -> None:
        """Work until the drain starts, finish running prompt groups, release waiting ones."""
        worker = self._worker
        worker.drain.on_start(lambda: self._put(None))
        worker.control.follow(
            self._wake_on_version, self._transport.subscribe(lambda: self._put(None))
        )
        leases = self._intake.open_leases(self._put)
        try:
            while not worker.drain.requested:
                self._step()
                self._lease_for_free_slots(leases)
            leases.stop()
            self._end_left()
            self._release_waiting()
            while (
                self._running
                and worker.drain.elapsed_ratio < FINISHING_RATIO
                and self._turns.may_work(has_work=False)
            ):
                self._wake()
                self._collect_finished()
                self._writer.settle_acknowledged()
                self._report_in_flight()
                worker.lifecycle.tick(working=True)
                self._end_left()
            self._hand_over_unfinished()
            self._writer.flush()
        finally:
            self._prefetcher.close()
            self._redelivery_guard.close()
            leases.close()

    def _hand_over_unfinished(self) -> None:
        """Store the unfinished samples of running prompt groups, and release the prompt groups: the
        next worker resumes from their tokens.
        """
        if not self._running:
            return
        for sample in (*self._engine.abort(), *self._engine.poll(timeout_seconds=0.0)):
            if (group := self._running.get(sample.prompt_group_id)) is not None:
                group.samples.append(sample)
        groups, self._running = list(self._running.values()), {}
        if finished := [group for group in groups if group.is_finished]:
            self._writer.send(finished, time.monotonic())
        unfinished = [group for group in groups if not group.is_finished]
        num_tokens = sum(
            self._partials.keep(group.issued.prompt_group_id, group.samples) for group in unfinished
        )
        for group in unfinished:
            group.release()
        log.info(
            "prompt_groups.released", num_prompt_groups=len(unfinished), num_tokens_kept=num_tokens
        )

    def _step(self) -> None:
        self._poll_leases(block=False)
        for lease in self._redelivery_guard.find_unclaimed():
            self._intake.give_up(lease)
        self._end_left()
        if self._turns.must_end():
            self._sleep()
        has_work = self._has_work() or bool(self._running)
        if may_work := self._turns.may_work(has_work=has_work):
            if self._weights.update_if_newer():
                self._asleep = False
            self._submit_waiting_groups()
        busy = may_work and self._engine.num_running > 0
        if busy:
            self._wake()
            self._collect_finished()
            self._writer.settle_acknowledged()
        else:
            self._writer.flush()
            self._poll_leases(block=True)
            if self._leaves_when_idle and not self._has_work() and not self._running:
                self._sleep()
        self._report_in_flight()
        self._worker.lifecycle.tick(working=busy or (may_work and self._has_work()))

    def _lease_for_free_slots(self, leases: LeaseSource) -> None:
        """Hold more prompt groups while samples of running ones have ended: they left slots."""
        if self._config.engine.max_prompt_groups:
            return
        num_spare = count_spare_leases(
            num_groups=len(self._running),
            num_running=self._engine.num_running,
            samples_per_prompt=self._config.run.samples_per_prompt,
        )
        if num_spare != self._num_spare_leases:
            leases.add_capacity(num_spare - self._num_spare_leases)
            self._num_spare_leases = num_spare

    def _wake(self) -> None:
        """Let a sleeping engine work again."""
        if self._asleep:
            self._engine.wake()
            self._asleep = False

    def _sleep(self) -> None:
        """Let the trainer work."""
        if not self._asleep or self._turns.has_device:
            with self._worker.lifecycle.transfer("free the engine's memory"):
                self._turns.sleep(self._engine)
            self._asleep = True

    def _report_in_flight(self) -> None:
        self._worker.heartbeat.set_in_flight(
            len(self._writer.sent) + len(self._running) + len(self._waiting),
            prompt_groups=(*self._writer.sent, *self._running, *self._waiting),
            written=tuple(islice(reversed(self._writer.written), NUM_REPORTED_GROUPS)),
        )

    def _has_work(self) -> bool:
        """Return whether a prompt group waits for a published version, which the engine may not
        have loaded.
        """
        published = self._worker.control.policy_version
        return not self._worker.control.is_paused and any(
            group.issued.required_policy_version <= published for group in self._waiting.values()
        )

    def _put(self, lease: Lease | None) -> None:
        """Put a lease, or None to wake the loop, into the inbox from any thread; a running engine
        returns at its next token.
        """
        self._inbox.put(lease)
        self._engine.interrupt()

    def _poll_leases(self, *, block: bool) -> None:
        """Take the leases from the inbox; with `block`, wait for the first item, or until a
        heartbeat is due.
        """
        try:
            lease = self._inbox.get(timeout=IDLE_SECONDS) if block else self._inbox.get_nowait()
            while True:
                if lease is not None:
                    self._open_lease(lease)
                lease = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _open_lease(self, lease: Lease) -> None:
        if (event := self._intake.take(lease)) is None:
            return
        if event.prompt_group_id in self._writer.written:
            lease.done()
        elif (group := self._find_inflight(event.prompt_group_id)) is not None:
            group.leases.append(lease)
        elif lease.delivery_count >= self._intake.max_deliveries + DELIVERY_MARGIN:
            self._intake.give_up(
                lease
            )  # if the worker ended while it waits, the broker would drop the record
        elif lease.delivery_count >= self._intake.max_deliveries:
            self._redelivery_guard.hold(event.prompt_group_id, lease)
        else:
            try:
                self._waiting[event.prompt_group_id] = self._intake.render(lease, event)
            except (PoisonSample, ValueError) as error:
                self._worker.records.dead_letter(lease.record, PoisonSample(str(error)))
                self._intake.end(lease, Outcome.FAILED, f"prompt can't be rendered: {error}")

    def _find_inflight(self, prompt_group_id: str) -> InflightGroup | None:
        return (
            self._running.get(prompt_group_id)
            or self._writer.sent.get(prompt_group_id)
            or self._waiting.get(prompt_group_id)
        )

    def _submit_waiting_groups(self) -> None:
        """Submit waiting prompt groups, oldest first, while the engine has capacity, its version is
        new enough and their media are fetched.
        """
        loaded = self._engine.policy_version
        if self._worker.control.is_paused or not may_submit(
            self._config.run.weight_update_mode,
            published=self._worker.control.policy_version,
            loaded=loaded,
            refused=self._weights.refused_version,
        ):
            return
        num_refused = 1
        while num_refused:
            chosen = choose_submissions(
                (group.issued for group in self._waiting.values() if group.has_media),
                loaded=loaded,
                room=self._config.engine.max_running_samples - self._engine.num_running,
                num_running=self._engine.num_running,
            )
            groups = [self._waiting.pop(issued.prompt_group_id) for issued in chosen]
            num_refused = sum(not self._submit(group) for group in groups)

    def _end_left(self) -> None:
        """End the prompt groups of steps that have their batch, waiting or running: no step trains
        them, and the next one needs their rows of the engine.
        """
        if self._config.run.sample_order != "fifo":
            return
        published = self._worker.control.policy_version
        left = {
            name: group
            for groups in (self._waiting, self._running)
            for name, group in groups.items()
            if group.issued.train_step < published and not is_external(name)
        }
        if not left:
            return
        running = [group for name, group in left.items() if name in self._running]
        if unfinished := [name for group in running for name in group.unfinished_ids]:
            aborted = self._engine.abort(unfinished)
            log.info(
                "prompt_groups.aborted",
                num_prompt_groups=len(running),
                num_tokens=sum(sample.num_sampled_tokens for sample in aborted),
            )
        for groups in (self._waiting, self._running):
            for name in left.keys() & groups.keys():
                del groups[name]
        self._intake.end_groups(left.values(), Outcome.EXPIRED, describe_left(published))

    def _submit(self, group: InflightGroup) -> bool:
        self._wake()
        try:
            if group.media is not None:
                group.media.result()
            self._engine.submit(
                build_generation_request(
                    group,
                    config=self._config,
                    policy_version=self._engine.policy_version,
                    stop_token_ids=self._renderer.stop_token_ids,
                    library=self._library,
                )
            )
        except PoisonSample as error:
            self._worker.records.dead_letter(group.leases[0].record, error)
            for lease in group.leases:
                self._intake.end(lease, Outcome.FAILED, f"engine refused the prompt: {error}")
            return False
        self._running[group.issued.prompt_group_id] = group
        group.trace = self._begin_trace(group)
        return True

    def _begin_trace(self, group: InflightGroup) -> TracedWork:
        traces, name = self._worker.records.traces, group.issued.prompt_group_id
        traces.record_wait(name, PROMPT_GROUPS)
        delivery = max(lease.delivery_count for lease in group.leases)
        return traces.begin(
            "generate",
            name,
            topic=PROMPT_GROUPS,
            engine=self._config.rollout_engine,
            delivery=delivery,
        )

    def _collect_finished(self) -> None:
        started = time.monotonic()
        finished = []
        with self._monitor.activity("generating"):
            samples = self._engine.poll(
                timeout_seconds=SETTLE_SECONDS if self._writer.sent else STEP_SECONDS
            )
        for sample in samples:
            if (group := self._running.get(sample.prompt_group_id)) is None:
                continue  # it finished when its prompt group was aborted
            group.samples.append(sample)
            if group.is_complete:
                finished.append(self._running.pop(sample.prompt_group_id))
        self._worker.heartbeat.advance_to(self._engine.num_tokens)
        if self._running:
            failpoint("rollout.generating")
        if finished:
            self._writer.send(finished, started)

    def _release_waiting(self) -> None:
        while not self._inbox.empty():
            if (lease := self._inbox.get()) is not None:
                lease.release()
        self._redelivery_guard.release()
        for group in self._waiting.values():
            group.release()
        self._waiting = {}

    def _wake_on_version(self, event: Event) -> None:
        if isinstance(event, PolicyVersionPublished):
            self._put(None)
