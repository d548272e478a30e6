"""The rollout role: leases prompt groups, generates their samples, writes them, settles the leases.

Three sources put items into one inbox: the lanes (a lease), the control log (a new version), the
    drain. The loop waits
for the inbox while the engine is idle, and for the engine while it works. A lease is settled only
after all samples of its prompt group are acknowledged by the broker, so a worker that dies at any
instruction loses time, not prompts.
"""

from __future__ import annotations

import hashlib
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from itertools import islice
from typing import Any

import numpy as np
import structlog

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sft_targets import tokenize_group_targets
from relax_events.engines.protocol import (
    Engine,
    EnvironmentContext,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.replicas.router import Router
from relax_events.errors import CorruptRecord, PoisonSample
from relax_events.events.generations import with_generation_digest
from relax_events.events.parts import Outcome, VersionSegment
from relax_events.events.types import Event, PolicyVersionPublished, PromptGroupIssued
from relax_events.kafka.group_leases import ConsumerGroupLeases
from relax_events.kafka.leases import (
    DEFAULT_DELIVERY_LIMIT,
    Lease,
    LeaseSource,
    read_delivery_limit,
)
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.kafka.share_leases import ShareGroupLeases
from relax_events.media.library import MediaLibrary
from relax_events.objects.roots import list_message_media
from relax_events.objects.version_objects import build_version_folder
from relax_events.plugins import ENGINES, find_plugin
from relax_events.roles.engine_monitor import EngineWatch
from relax_events.roles.handover import Partials
from relax_events.roles.inflight_group import GroupInWork
from relax_events.roles.media_prefetch import MediaAhead
from relax_events.roles.redelivery import LastDeliveries
from relax_events.roles.sample_event import rolled_out
from relax_events.roles.weight_updater import VersionLoading
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.validation import check_issued
from relax_events.runtime.worker import Worker
from relax_events.telemetry.component_metrics import RoutingMetrics
from relax_events.telemetry.traces import TracedWork
from relax_events.weights.factory import open_weights_reader
from relax_events.weights.transport import WeightsReader

log = structlog.get_logger()
IDLE_SECONDS = 0.5
STEP_SECONDS = 0.25
FINISHING_RATIO = 0.75
"""Share of a drain in which what runs is finished; the rest is for keeping what is not."""
MAX_DELIVERIES = 8
# where the limit is reached the broker drops a record and tells nobody, so we give it up before
DELIVERY_MARGIN = 2
MAX_REMEMBERED_GROUPS = (
    1024  # a settlement that the broker missed brings its prompt group back within this many
)
NUM_REPORTED_GROUPS = 64


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    with open_worker("rollout", config, index=index, store=store, linger_ms=0) as worker:
        versions = worker.control
        engine = open_rollout_engine(
            config,
            name=config.rollout_engine,
            metrics=worker.metrics.routing,
            newest_version=lambda: versions.policy_version,
        )
        try:
            with closing(open_weights_reader(worker, store)) as transport:
                RolloutLoop(
                    worker, engine, transport, library=MediaLibrary(config, store=store)
                ).run()
        finally:
            engine.close()


def open_engine(config: RunConfig, *, name: str, metrics: RoutingMetrics) -> Engine:
    """Load an engine with the settings of the section `engine`; what it counts goes to the worker's
    metrics.

    Raises:
        ConfigError: No engine of that name is installed.
    """
    plugin = find_plugin(ENGINES, name, what=f"engine.name = {name!r}")
    engine: Engine = plugin.load()(config.model.path, config=config.engine, model=config.model)
    if isinstance(engine, Router):
        engine.set_metrics(metrics)
    return engine


def open_rollout_engine(
    config: RunConfig,
    *,
    name: str,
    metrics: RoutingMetrics,
    newest_version: Callable[[], int] | None = None,
) -> Engine:
    """Load an engine; where the run has an environment, one whose samples talk with it.

    Args:
        config: The run.
        name: Of the engine.
        metrics: What the engine counts goes here.
        newest_version: Media that the environment shows go with the objects of this version, which
            no sample at work is newer than.
    Raises:
        ConfigError: As `open_engine`, or the environment can't be loaded.
    """
    if not config.environment.function:
        return open_engine(config, name=name, metrics=metrics)
    from relax_events.environments.episodes import (
        MultiTurnEngine,  # which loads torch, as an engine of this machine does
    )
    from relax_events.environments.pool import EnvironmentPool

    with ExitStack() as on_failure:
        folder = (
            (lambda: build_version_folder(max(newest_version(), 0)))
            if newest_version
            else lambda: ""
        )
        pool = EnvironmentPool(config, libraries=lambda: MediaLibrary(config, folder=folder))
        on_failure.callback(pool.close)
        renderer = PromptRenderer.from_folder(
            config.model.path, config.data, media=config.model.media
        )
        engine = open_engine(config, name=name, metrics=metrics)
        episodes = MultiTurnEngine(
            engine, pool, config=config, renderer=renderer, library=MediaLibrary(config)
        )
        on_failure.pop_all()
    return episodes


def sample_seed(group_seed: int, sample_index: int) -> int:
    """Derive a sample's seed, so that the same sample is drawn alike wherever and whenever it is
    generated.
    """
    return int.from_bytes(
        hashlib.blake2b(f"{group_seed}/{sample_index}".encode(), digest_size=7).digest()
    )


class RolloutLoop:
    """See the module's docstring."""

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        transport: WeightsReader,
        *,
        library: MediaLibrary | None = None,
    ) -> None:
        self._worker, self._engine, self._transport = worker, engine, transport
        self._config = worker.config
        self._library = library or MediaLibrary(self._config)
        self._ahead = MediaAhead(MediaLibrary(self._config), on_arrival=lambda: self._put(None))
        self._renderer = PromptRenderer.from_folder(
            self._config.model.path, self._config.data, media=self._config.model.media
        )
        self._inbox: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._waiting: list[GroupInWork] = []
        self._running: dict[str, GroupInWork] = {}
        self._partials = Partials(open_store(self._config))
        self._written: deque[str] = deque(maxlen=MAX_REMEMBERED_GROUPS)
        self._last_deliveries = LastDeliveries(worker)
        self._watch = EngineWatch(worker, engine)
        self._versions = VersionLoading(worker, engine, transport, self._watch)
        self._max_deliveries = MAX_DELIVERIES
        self._asleep = False

    def run(self) -> None:
        """Work until the drain starts, finish what runs, release what waits."""
        worker = self._worker
        worker.drain.on_start(lambda: self._put(None))
        worker.control.follow(
            self._wake_on_version, self._transport.subscribe(lambda: self._put(None))
        )
        leases = self._open_leases()
        try:
            while not worker.drain.requested:
                self._turn()
            leases.stop()
            self._release_waiting()
            while self._running and worker.drain.elapsed_ratio < FINISHING_RATIO:
                self._generate()
                self._report_in_flight()
                worker.lifecycle.tick(working=True)
            self._leave_unfinished()
        finally:
            self._ahead.close()
            self._last_deliveries.close()
            leases.close()

    def _leave_unfinished(self) -> None:
        """Keep what has been generated of the prompt groups that run, and release them: whoever
        takes one next goes on with its tokens.
        """
        if not self._running:
            return
        for sample in (*self._engine.abort(), *self._engine.poll(timeout_seconds=0.0)):
            self._running[sample.prompt_group_id].samples.append(sample)
        groups, self._running = list(self._running.values()), {}
        if finished := [group for group in groups if group.is_finished]:
            self._write(finished, time.monotonic())
        unfinished = [group for group in groups if not group.is_finished]
        num_tokens = sum(
            self._partials.keep(group.issued.prompt_group_id, group.samples) for group in unfinished
        )
        for group in unfinished:
            group.release()
        log.info(
            "prompt_groups.released", num_prompt_groups=len(unfinished), num_tokens_kept=num_tokens
        )

    def _open_leases(self) -> LeaseSource:
        kind: Any = (
            ShareGroupLeases
            if self._config.broker.prompt_queue == "share_group"
            else ConsumerGroupLeases
        )
        plan = self._worker.plan
        if kind is ShareGroupLeases:
            limit = read_delivery_limit(self._worker.connection, plan.consumer_group("rollout"))
            self._max_deliveries = (
                limit if limit <= DEFAULT_DELIVERY_LIMIT else limit - DELIVERY_MARGIN
            )
        source: LeaseSource = kind(
            self._worker.connection,
            group=plan.consumer_group("rollout"),
            topic=plan.topic("prompt.groups"),
            lanes=self._config.num_lanes,
            on_lease=self._put,
        )
        return source

    def _turn(self) -> None:
        self._take_leases(wait=False)
        for lease in self._last_deliveries.unclaimed():
            self._give_up(lease)
        if self._versions.load_newest():
            self._asleep = False
        self._admit()
        busy = self._engine.num_running > 0
        if busy:
            self._generate()
        else:
            self._take_leases(wait=True)
            if self._config.run.mode == "sync" and not self._waiting and not self._asleep:
                self._engine.sleep()
                self._asleep = True
        self._report_in_flight()
        self._worker.lifecycle.tick(working=busy or self._is_blocked_on_weights())

    def _report_in_flight(self) -> None:
        waiting = (group.issued.prompt_group_id for group in self._waiting)
        self._worker.heartbeat.set_in_flight(
            len(self._running) + len(self._waiting),
            prompt_groups=(*self._running, *waiting),
            written=tuple(islice(reversed(self._written), NUM_REPORTED_GROUPS)),
        )

    def _is_blocked_on_weights(self) -> bool:
        """Tell whether a prompt group waits though the version that it needs is out: the engine has
        not loaded it, for whatever reason.
        """
        published = self._worker.control.policy_version
        return not self._worker.control.is_paused and any(
            group.issued.required_policy_version <= published for group in self._waiting
        )

    def _put(self, lease: Lease | None) -> None:
        """Put a lease, or a reason to look around, into the inbox from any thread; an engine at
        work hands over to us at its next token.
        """
        self._inbox.put(lease)
        self._engine.interrupt()

    def _take_leases(self, *, wait: bool) -> None:
        """Take what lies in the inbox; with `wait`, wait for the first item (and wake up to
        beat).
        """
        try:
            lease = self._inbox.get(timeout=IDLE_SECONDS) if wait else self._inbox.get_nowait()
            while True:
                if lease is not None:
                    self._open_lease(lease)
                lease = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _open_lease(self, lease: Lease) -> None:
        event = self._issued(lease.record)
        if event is None:
            self._fail(lease, "prompt record could not be used")
        elif event.prompt_group_id in self._written:
            lease.done()
        elif (group := self._at_work(event.prompt_group_id)) is not None:
            group.leases.append(lease)
        elif lease.delivery_count >= self._max_deliveries + DELIVERY_MARGIN:
            self._give_up(
                lease
            )  # were this worker to end while it asks, the broker would drop the record
        elif lease.delivery_count >= self._max_deliveries:
            self._last_deliveries.hold(event.prompt_group_id, lease)
        else:
            try:
                self._waiting.append(self._rendered(lease, event))
            except (PoisonSample, ValueError) as error:
                self._worker.records.dead_letter(lease.record, PoisonSample(str(error)))
                self._fail(lease, f"prompt can't be rendered: {error}")

    def _rendered(self, lease: Lease, issued: PromptGroupIssued) -> GroupInWork:
        answers = (
            ()
            if self._config.algorithm.has_rewards
            else tokenize_group_targets(issued, renderer=self._renderer)
        )
        prompt_tokens = self._renderer.prompt_tokens(issued.messages, tools=issued.tools)
        group = GroupInWork([lease], issued, prompt_tokens, answers)
        if (
            lease.delivery_count > 1 or self._config.broker.prompt_queue == "consumer_group"
        ):  # which does not count deliveries
            group.resume(
                self._partials.find(issued.prompt_group_id, num_samples=issued.samples_per_prompt)
            )
        shown = [
            reference
            for sample in group.partials.values()
            for reference in list_message_media(sample.turns)
        ]
        group.media = self._ahead.bring([*list_message_media(issued.messages), *shown])
        return group

    def _issued(self, record: Record) -> PromptGroupIssued | None:
        """Decode and check; what is unfit goes to the dead letters."""
        event = self._worker.records.decode(record)
        if event is None:
            return None
        try:
            return check_issued(event)
        except PoisonSample as error:
            self._worker.records.dead_letter(record, error)
            return None

    def _at_work(self, prompt_group_id: str) -> GroupInWork | None:
        waiting = (
            group for group in self._waiting if group.issued.prompt_group_id == prompt_group_id
        )
        return self._running.get(prompt_group_id) or next(waiting, None)

    def _fail(self, lease: Lease, reason: str) -> None:
        """End a prompt group that can't be generated, and take it off the queue."""
        with suppress(
            CorruptRecord
        ):  # a stranger's record belongs to no prompt group: its dead letter is all that can be done
            self._worker.records.producer.send(
                self._worker.records.build_end_request(lease.record.key, Outcome.FAILED, reason)
            )
        self._worker.records.producer.flush()
        lease.done()

    def _give_up(self, lease: Lease) -> None:
        self._fail(
            lease,
            (
                f"given up at its delivery number {lease.delivery_count}: the workers that took "
                "it died or were stopped"
            ),
        )

    def _admit(self) -> None:
        """Start waiting prompt groups, oldest first, while there is room, the engine's version is
        new enough and their media are here.
        """
        if self._worker.control.is_paused or self._must_drain():
            return
        self._waiting.sort(key=lambda group: (group.issued.train_step, group.issued.group_index))
        room = self._config.engine.max_running_samples - self._engine.num_running
        kept = []
        for group in self._waiting:
            size = group.issued.samples_per_prompt
            is_early = (
                group.issued.required_policy_version > self._engine.policy_version
                or not group.has_media
            )
            if is_early or (size > room and self._engine.num_running > 0):
                kept.append(group)
            elif self._submit(group):
                room -= size
        self._waiting = kept

    def _must_drain(self) -> bool:
        """With `finish`, a published version stops admission until what runs has ended and the
        version is loaded, unless it is unfit.
        """
        published = self._worker.control.policy_version
        return (
            self._config.run.weight_update_mode == "drain"
            and published > self._engine.policy_version
            and published != self._versions.refused_version
        )

    def _submit(self, group: GroupInWork) -> bool:
        issued = group.issued
        finished = {sample.sample_id for sample in group.samples}
        indices = [
            index
            for index in range(issued.samples_per_prompt)
            if f"{issued.prompt_group_id}/{index}" not in finished
        ]
        samples = tuple(self._request(group, index) for index in indices)
        if self._asleep:
            self._engine.wake()
            self._asleep = False
        try:
            if group.media is not None:
                group.media.result()
            self._engine.submit(
                GenerationRequest(
                    prompt_group_id=issued.prompt_group_id,
                    prompt_tokens=group.prompt_tokens,
                    samples=samples,
                    sampling=self._config.engine.sampling,
                    stop_token_ids=self._renderer.stop_token_ids,
                    media=tuple(
                        self._library.load(reference)
                        for reference in list_message_media(issued.messages)
                    ),
                    num_top_tokens=self._config.algorithm.num_rollout_top_tokens,
                    environment_context=EnvironmentContext(
                        messages=issued.messages,
                        answer=issued.answer,
                        metadata=issued.metadata,
                        tools=issued.tools,
                    ),
                )
            )
        except PoisonSample as error:
            self._worker.records.dead_letter(group.leases[0].record, error)
            for lease in group.leases:
                self._fail(lease, f"engine refused the prompt: {error}")
            return False
        self._running[issued.prompt_group_id] = group
        group.work = self._begin_trace(group)
        return True

    def _begin_trace(self, group: GroupInWork) -> TracedWork:
        traces, name = self._worker.records.traces, group.issued.prompt_group_id
        traces.record_wait(name, "prompt.groups")
        delivery = max(lease.delivery_count for lease in group.leases)
        return traces.begin(
            "generate",
            name,
            topic="prompt.groups",
            engine=self._config.rollout_engine,
            delivery=delivery,
        )

    def _request(self, group: GroupInWork, index: int) -> SampleRequest:
        """Ask for a sample: from its first token on, or for the answer that it brings, which no
        policy drew: its log-probabilities are 0.
        """
        name, seed = (
            f"{group.issued.prompt_group_id}/{index}",
            sample_seed(group.issued.seed, index),
        )
        if (partial := group.partials.get(index)) is not None:
            return SampleRequest(
                sample_id=name,
                seed=seed,
                tokens=partial.tokens,
                logprobs=partial.logprobs,
                segments=partial.segments,
                top_tokens=partial.top_tokens,
                loss_mask=partial.loss_mask,
                turns=partial.turns,
                routed_experts=partial.routed_experts,
            )
        tokens = group.answers[index].tokens if group.answers else np.empty(0, np.int32)
        return SampleRequest(
            sample_id=name,
            seed=seed,
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            segments=(VersionSegment(self._engine.policy_version, len(tokens)),)
            if group.answers
            else (),
        )

    def _generate(self) -> None:
        started = time.monotonic()
        finished = []
        with self._watch.doing("generating"):
            samples = self._engine.poll(timeout_seconds=STEP_SECONDS)
        for sample in samples:
            group = self._running[sample.prompt_group_id]
            group.samples.append(sample)
            if group.is_complete:
                finished.append(self._running.pop(sample.prompt_group_id))
        self._worker.heartbeat.advance_to(self._engine.num_tokens)
        if self._running:
            failpoint("rollout.generating")
        if finished:
            self._write(finished, started)

    def _write(self, groups: list[GroupInWork], started: float) -> None:
        """Make samples safe first, settle their leases after."""
        for group in groups:
            prompt_group_id, errors = group.issued.prompt_group_id, group.errors
            failure = (
                [
                    self._worker.records.build_end_request(
                        prompt_group_id, Outcome.FAILED, f"engine: {errors[0]}"
                    )
                ]
                if errors
                else []
            )
            for record in failure or self._records(group):
                self._worker.records.producer.send(record)
        failpoint("rollout.before_flush")
        self._worker.records.producer.flush()
        failpoint("rollout.before_settle")
        for group in groups:
            self._written.append(group.issued.prompt_group_id)
            group.done()
            group.end_work()
        self._partials.forget(group.issued.prompt_group_id for group in groups if group.is_resumed)
        self._worker.metrics.tokens(
            sum(sample.num_sampled_tokens for group in groups for sample in group.samples)
        )
        self._worker.lifecycle.record_processed(len(groups), started)

    def _records(self, group: GroupInWork) -> list[ProducerRecord]:
        owner = group.policy_versions[0]
        samples = [
            rolled_out(group, sample, owner=owner, worker=self._worker, renderer=self._renderer)
            for sample in group.samples
        ]
        return [
            self._worker.records.build_for_sample(
                "rollout.samples",
                sample,
                prompt_group_id=sample.prompt_group_id,
                policy_version=owner,
            )
            for sample in with_generation_digest(samples)
        ]

    def _release_waiting(self) -> None:
        while not self._inbox.empty():
            if (lease := self._inbox.get()) is not None:
                lease.release()
        self._last_deliveries.release()
        for group in self._waiting:
            group.release()
        self._waiting = []

    def _wake_on_version(self, event: Event) -> None:
        if isinstance(event, PolicyVersionPublished):
            self._put(None)
