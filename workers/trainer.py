"""The trainer: takes prompt groups as they become ready, updates the policy, publishes each
version.

    advantage.samples, prompt.end-requests
            └──▶ assemble prompt groups ──▶ agree with the other ranks ──▶ micro-batches ──▶
            forward, backward
                                                                                                            │
    control.* ◀── one transaction: step, outcomes, version, offsets ◀── weights to the object store
    ◀── update ◀┘

Each rank reads the shards `shard mod ranks == rank` of every slot and waits for records; a round of
small collectives tells how many prompt groups the ranks hold together, so that the step ends at the
exact count. Offsets become real with the step that used their records. After a crash the recorded
steps since the last checkpoint are trained again.

A replay (`parent.run`) has no samples of its own: it waits for the steps that its source committed
and trains their batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson
import structlog

from relax_events.config import RunConfig
from relax_events.errors import (
    ConfigError,
    CorruptRecord,
    ForeignRecord,
    PoisonSample,
    RelaxError,
    StepNotFinite,
    WeightsError,
)
from relax_events.events.parts import CheckpointRef, TopicOffset
from relax_events.events.types import Event, PolicyVersionPublished, PromptGroupEnded, SampleReady
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.projections.training_history import TrainingHistory
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.parent_run import SourceRun
from relax_events.runtime.record_io import UNUSABLE
from relax_events.runtime.validation import (
    check_ended,
    check_ready,
    check_trainable,
    outcomes_on,
    require_belonging,
)
from relax_events.runtime.worker import Worker
from relax_events.staleness import IssuedGroup, ReadyGroup, select_groups
from relax_events.telemetry.traces import TracedWork
from relax_events.topics import TopicPlan
from relax_events.topics.plan import TRAINER_INPUTS, TRAINING_SAMPLES
from relax_events.training.backend.factory import open_backend
from relax_events.training.backend.master_weights import reconcile
from relax_events.training.backend.protocol import TrainerBackend, TrainerState
from relax_events.training.batch.assembly import BatchAssembler, LocatedSample
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.batch.step_batch import StepBatch, UntrainableGroup
from relax_events.training.batch.token_sequence import read_array
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.checkpoint.pending import PendingCheckpoint
from relax_events.training.distributed import open_ranks
from relax_events.training.issue_terms import IssueRules
from relax_events.training.phases import PhaseTimer
from relax_events.training.publishing import StepPublisher, TrainedStep
from relax_events.training.ranks import Ranks
from relax_events.training.replay.follower_position import FollowerPosition
from relax_events.training.replay.initial_weights import read_initial_state
from relax_events.training.replay.parent_steps import ReplaySource, open_recorded_batches
from relax_events.training.replay.recorded_batches import RecordedBatch, RecordedBatches
from relax_events.training.replay.recovery import Replay
from relax_events.training.step_record import RankStepResult
from relax_events.weights.artifact_reader import is_stored
from relax_events.weights.transport import StoreReader

log = structlog.get_logger()
IDLE_SECONDS = 0.5
ROUND_SECONDS = 0.1
COLLECTIVE_MARGIN_SECONDS = 60.0
"""How much later than its own deadline a collective counts as hung."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop. This process may be one rank of several: `relax run`
    numbers them by index, torchrun does not.
    """
    store = open_store(config)
    with open_ranks(timeout_seconds=config.trainer.collective_timeout_seconds) as ranks:
        telemetry = config.telemetry.model_copy(
            update={"metrics_port": config.telemetry.port_of(ranks.rank)}
        )
        config = config.model_copy(update={"telemetry": telemetry})
        followed = ("control.evaluations",) if config.weights.keep_best else ()
        with open_worker(
            "trainer", config, index=index or ranks.rank, store=store, follow=followed
        ) as worker:
            seconds = config.trainer.collective_timeout_seconds + COLLECTIVE_MARGIN_SECONDS
            ranks.wrap_collectives(
                lambda: worker.lifecycle.activity(
                    "wait for the other ranks", deadline_seconds=seconds, is_progress=False
                )
            )
            backend = open_backend(config, ranks)
            TrainLoop(worker, backend, ranks, store).run()


class TrainLoop:
    """See the module's docstring."""

    def __init__(
        self, worker: Worker, backend: TrainerBackend, ranks: Ranks, store: ObjectStore
    ) -> None:
        self._worker, self._config, self._backend, self._ranks, self._store = (
            worker,
            worker.config,
            backend,
            ranks,
            store,
        )
        self._topic = worker.plan.topic(TRAINING_SAMPLES)
        self._terms = IssueRules.from_config(worker.config)
        self._reader = LogReader(
            worker.connection, consumer_group=worker.plan.consumer_group("trainer")
        )
        worker.lifecycle.track_lag(self._reader)
        self._library = MediaLibrary(self._config, store=store)
        self._checkpoints = Checkpoints(
            store, ranks=ranks, keep=self._config.trainer.keep_checkpoints
        )
        self._shares: list[RankStepResult] = []
        self._pending: PendingCheckpoint | None = None
        self._checkpoint: CheckpointRef | None = None
        self._checkpoint_begun = time.monotonic()
        self._is_ahead = False
        self._phases = PhaseTimer()
        self._began_ns = 0
        self._in_training: list[TracedWork] = []
        backend.on_progress(self._progress_in_step)
        self._source = (
            SourceRun.read(worker.connection, self._config.parent.run, own=self._config)
            if self._config.parent.run
            else None
        )
        self._batches: RecordedBatches | None = None
        self._in_hand: RecordedBatch | None = None
        self._recorded: ReplaySource | None = None
        self._follower: FollowerPosition | None = None

    def run(self) -> None:
        """Recover, then train until the goal or the drain."""
        worker = self._worker
        is_first = self._ranks.rank == 0
        self._publisher = (
            StepPublisher(worker, self._reader, store=self._store, checkpoints=self._checkpoints)
            if is_first
            else None
        )
        self._ranks.all_gather_bytes(
            b""
        )  # only now is an earlier trainer fenced, and the history the same for all ranks
        if is_first and self._config.is_replay:
            self._follower = FollowerPosition(worker)
            self._follower.retain_all()
        num_recovered = self._recover()
        self._checkpoint_begun = time.monotonic()
        worker.control.follow(*([] if self._publisher is None else [self._publisher.best.apply]))
        try:
            while self._backend.policy_version < self._config.last_version and self._train_step():
                pass
            self._settle()
            if (
                self._follower is not None
                and self._backend.policy_version >= self._config.last_version
            ):
                self._follower.release_all()
            log.info(
                "trainer.finished",
                policy_version=self._backend.policy_version,
                num_recovered_steps=num_recovered,
            )
            while not self._agree_to_drain():
                worker.lifecycle.tick(working=False)
                worker.drain.wait(IDLE_SECONDS)
        finally:
            self._checkpoints.close()
            self._reader.close()
            if self._recorded is not None:
                self._recorded.close()
            if self._follower is not None:
                self._follower.close()
            if self._publisher is not None:
                self._publisher.close()

    def _recover(self) -> int:
        """Bring weights, optimizer and positions to where the log says that training stands; return
        how many steps the run has committed.
        """
        history = TrainingHistory.read(self._worker)
        restored = self._checkpoints.load_newest(history.checkpoints())
        if restored is not None:
            self._checkpoint = restored.reference
            self._backend.load_state(restored.state)
            history.apply_checkpoint(restored.extra)
            log.info("checkpoint.loaded", policy_version=self._backend.policy_version)
        else:
            history.require_steps_from(self._config.first_version)
            if self._source is not None:
                self._start_from(self._source)
        if self._source is not None and self._config.is_replay:
            self._batches = open_recorded_batches(self._worker, self._source, self._ranks)
        missing = [
            step for step in history.steps if step.train_step >= self._backend.policy_version
        ]
        if not Replay(self._worker, self._backend, self._ranks, batches=self._batches).run(missing):
            with self._worker.lifecycle.transfer("read the published weights"):
                self._take_published(history)
        decided = set(history.ended_group_ids)
        max_staleness, forgotten_step = self._config.run.max_staleness, history.forgotten_step
        self._assembler = BatchAssembler(
            max_staleness=max_staleness, decided=decided, forgotten_step=forgotten_step
        )
        self._open_batches(history)
        with self._worker.lifecycle.transfer("write the first weights"):
            is_lost = not history.is_fresh and self._is_newest_lost(history.published[-1])
            tensors = self._backend.weights() if history.is_fresh or is_lost else {}
            if self._publisher is not None:
                self._publisher.resume(history)
                if history.is_fresh:
                    self._publisher.publish_initial(
                        tensors, policy_version=self._config.first_version
                    )
                elif is_lost:
                    self._publisher.rewrite_newest_weights(history.published[-1], tensors)
                self._publisher.prune_weights(self._backend.policy_version)
        return history.num_steps

    def _is_newest_lost(self, published: PolicyVersionPublished) -> bool:
        """Tell all ranks whether objects of the newest version are missing in the store.
        Collective.
        """
        is_lost = self._ranks.rank == 0 and not is_stored(self._store, published.artifact)
        return bool(self._ranks.broadcast(b"lost" * is_lost if self._ranks.rank == 0 else None))

    def _start_from(self, source: SourceRun) -> None:
        """Take over the source's weights; a checkpoint of our own makes us independent of how long
        it keeps them.
        """
        version = self._config.first_version
        start = read_initial_state(source, version, ranks=self._ranks)
        if start is None:
            return
        tensors = {**self._backend.state().tensors, **start.state.tensors}
        self._backend.load_state(TrainerState(policy_version=version, tensors=tensors))
        with self._worker.lifecycle.transfer("write the first checkpoint"):
            pending = self._checkpoints.save(
                self._backend.state(), extra={"consumed": [], "id_window": []}
            )
            self._checkpoint = pending.wait(self._config.health.transfer_seconds)
        log.info(
            "parent.loaded",
            parent_run=source.config.run.id,
            policy_version=version,
            kind=start.kind,
        )

    def _open_batches(self, history: TrainingHistory) -> None:
        """Go on where the log says: at our own positions, or behind the last step of the source
        that we trained.
        """
        if self._source is not None and self._batches is not None:
            first, last = self._backend.policy_version, self._config.last_version
            self._recorded = ReplaySource(self._source, self._batches, first=first, last=last)
            return
        positions = history.positions()
        mine = [
            partition
            for partition in range(self._worker.plan.num_sample_partitions)
            if self._owns(partition)
        ]
        wanted = [(entity, partition) for entity in TRAINER_INPUTS for partition in mine]
        self._reader.assign(
            {
                (self._worker.plan.topic(entity), partition): positions.get((entity, partition), 0)
                for entity, partition in wanted
            }
        )

    def _owns(self, partition: int) -> bool:
        return (
            partition % self._worker.plan.partitions_per_version % self._ranks.size
            == self._ranks.rank
        )

    def _take_published(self, history: TrainingHistory) -> None:
        """Where kernels are not deterministic, replay ends near the published weights: those are
        the truth, as exactly as they are written.
        """
        try:
            published = StoreReader(self._store).fetch(history.published[-1])
        except WeightsError as error:
            run_id, older = self._config.run.id, max(history.published[-1].policy_version - 1, 0)
            way_out = (
                f"restore its objects, or go on as another run: relax runs fork {run_id} NEW "
                f"--at-version {older}"
            )
            raise WeightsError(
                f"{error}; replay ended beside this version, so the trainer can't do without "
                f"it: {way_out}"
            ) from error
        state, found = reconcile(self._backend.state(), published.tensors)
        self._backend.load_state(state)
        log.warning(
            "replay.diverged",
            policy_version=state.policy_version,
            num_weights=found.num_weights,
            num_moved=found.num_moved,
            largest_move=found.largest_move,
        )

    def _train_step(self) -> bool:
        """Train one step; return False when the drain cut it short (its records stay undecided and
        will be read again).
        """
        version = self._backend.policy_version
        batch = self._open_batch(version)
        self._phases = self._phases.next_step()
        self._began_ns, self._in_training = time.time_ns(), []
        is_whole = (
            self._train_live(version, batch)
            if self._recorded is None
            else self._train_recorded(self._recorded, batch)
        )
        if is_whole:
            failpoint("trainer.after_accumulate")
            self._finish_step(batch.share)
        return is_whole

    def _open_batch(self, version: int) -> StepBatch:
        max_tokens, whole = (
            self._config.trainer.max_tokens_per_micro_batch,
            self._config.algorithm.needs_whole_groups,
        )
        batcher = MicroBatcher(max_tokens=max_tokens, whole_prompt_groups=whole)
        share = RankStepResult(self._ranks.rank)
        return StepBatch(
            share,
            batcher,
            trainer_version=version,
            accumulate=self._accumulate,
            discard=self._backend.discard,
        )

    def _train_live(self, version: int, batch: StepBatch) -> bool:
        """Take prompt groups as they become ready, until the ranks hold a step's; False when the
        drain came first.
        """
        remaining = self._config.run.prompts_per_step
        self._assembler.advance(version)
        taken = remaining
        while remaining:
            if not taken:
                self._settle()
            self._read(version, wait=not taken)
            if self._agree_to_drain():
                return False
            self._commit_ends()
            taken, mine = self._choose(version, remaining)
            remaining -= taken
            for group in mine:
                self._feed(group, batch)
            if not remaining:
                remaining = self._finish_batch(batch)
            self._worker.lifecycle.tick(working=taken > 0)
        return True

    def _finish_batch(self, batch: StepBatch) -> int:
        """Train what is pending, end what could not be trained as failed, and return how many
        prompt groups the ranks still miss for it.
        """
        batch.flush()
        version, refused = self._backend.policy_version, batch.pop_untrainable()
        for group in refused:
            self._refuse(group.positions, group.error)
            reason = f"poison: {group.error}"
            self._assembler.fail(
                group.prompt_group_id,
                reason,
                policy_version=group.policy_version,
                trainer_version=version,
            )
        return sum(
            int.from_bytes(count, "big")
            for count in self._ranks.all_gather_bytes(len(refused).to_bytes(4, "big"))
        )

    def _refuse(self, places: list[tuple[int, int]], error: RelaxError) -> None:
        """Send records that were read before to the dead letters."""
        reader = LogReader(self._worker.connection)
        try:
            for record in reader.read_at(self._topic, set(places)).values():
                self._worker.records.dead_letter(record, error)
        finally:
            reader.close()

    def _train_recorded(self, recorded: ReplaySource, batch: StepBatch) -> bool:
        """Train what the source trained in this step, in its order; False when the drain came
        before the source's step.
        """
        while not self._agree_to_drain():
            if self._agree_on_next(recorded):
                break
            self._worker.lifecycle.tick(working=False)
        else:
            return False
        with self._phases.measure("decode"), self._worker.lifecycle.piece("read a recorded batch"):
            step = self._in_hand = recorded.take()
        try:
            for item in step.samples:
                self._trainable(item.sample)
            batch.feed(step.samples)
            batch.flush()
            for refused in batch.pop_untrainable():
                raise refused.error
        except PoisonSample as error:
            raise ConfigError(
                f"the rollouts of run {self._config.parent.run} can't be trained with these "
                f"settings: {error}"
            ) from error
        self._worker.lifecycle.tick(working=True)
        return True

    def _agree_on_next(self, recorded: ReplaySource) -> bool:
        """Return whether every rank sees the source's next step; all ranks get the same answer."""
        with self._phases.measure("wait"):
            mine = recorded.has_next(
                timeout_seconds=IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS
            )
        return all(flag == b"1" for flag in self._ranks.all_gather_bytes(b"1" if mine else b"0"))

    def _read(self, version: int, *, wait: bool) -> None:
        """Hand new records to the assembler; wait for some only when there was nothing left to
        train.
        """
        seconds = IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS
        with self._phases.measure("wait"):
            records = self._reader.fetch(1000, timeout_seconds=seconds if wait else 0.0)
        with self._phases.measure("decode"):
            for record in records:
                self._take(record, version)
                self._worker.lifecycle.record_progress()

    def _take(self, record: Record, version: int) -> None:
        event = self._worker.records.decode(record)
        reason = "record could not be decoded"
        if event is not None:
            try:
                self._assembler.add(
                    record, self._admitted(record, event, version), trainer_version=version
                )
            # whose it is, nobody knows: a prompt group that it names may have honest samples
            except ForeignRecord as error:
                self._worker.records.dead_letter(record, error)
                self._assembler.skip(record)
                return
            except PoisonSample as error:
                self._worker.records.dead_letter(record, error)
                reason = f"poison: {error}"
            else:
                return
        try:
            self._terms.check_shard(record, IssuedGroup.parse(record.key).prompt_group_id)
        except (CorruptRecord, ForeignRecord):
            self._assembler.skip(record)
        else:
            self._assembler.reject(record, reason, trainer_version=version)

    def _admitted(
        self, record: Record, event: Event, version: int
    ) -> SampleReady | PromptGroupEnded:
        """Return a sample that can be trained, or an end that a role may ask for; raises
        ForeignRecord, and PoisonSample as `_trainable`.
        """
        entity = TopicPlan.parse_entity(record.topic)
        require_belonging(entity, event)
        if isinstance(event, PromptGroupEnded):
            ended = check_ended(event, allowed=outcomes_on(entity))
            self._terms.check_shard(record, ended.prompt_group_id)
            return ended
        if isinstance(event, SampleReady):
            self._terms.check_sample(record, event, trainer_version=version)
        return self._trainable(check_ready(event))

    def _trainable(self, sample: SampleReady) -> SampleReady:
        """Return a sample that can be trained, its media at hand; raises PoisonSample as
        `check_trainable`, or where its media can't be had.
        """
        self._library.prefetch(sample.media)
        try:
            self._library.require_fit(
                read_array(sample, "tokens"),
                ~read_array(sample, "loss_mask").astype(bool),
                sample.media,
            )
        except PoisonSample as error:
            raise PoisonSample(f"sample {sample.sample_id}: {error}") from error
        backend = self._backend
        algorithm, bound = self._config.algorithm, self._config.trainer.max_abs_advantage
        return check_trainable(
            sample,
            algorithm=algorithm,
            max_abs_advantage=bound,
            vocab_size=backend.vocab_size,
            experts=backend.experts,
        )

    def _agree_to_drain(self) -> bool:
        """Return whether any rank was asked to end, and note whether the step before is still
        uncommitted; all ranks get the same answer.
        """
        self._settle(wait=False)
        is_ahead = self._publisher is not None and self._publisher.has_uncommitted_step
        flags = self._ranks.all_gather_bytes(bytes([self._worker.drain.requested, is_ahead]))
        self._is_ahead = any(flag[1] for flag in flags)
        return any(flag[0] for flag in flags)

    def _settle(self, *, wait: bool = True) -> None:
        """Commit the step before, if it is not: its weights were written beside this one."""
        publisher = self._publisher
        if (
            publisher is None
            or not publisher.has_uncommitted_step
            or not (wait or publisher.weights_are_written)
        ):
            return
        with self._phases.measure("weights"), self._worker.lifecycle.transfer("write weights"):
            publisher.wait_until_written()
        with self._phases.measure("commit"), self._worker.lifecycle.piece("commit the step"):
            publisher.commit()

    def _commit_ends(self) -> None:
        """Commit prompt groups that ended untrained, at once, so that the prompter can fill their
        seats; but after the step before.
        """
        if self._is_ahead:
            return
        share = RankStepResult(self._ranks.rank, ended=self._assembler.pending_outcomes())
        ended = [end for other in self._gather(share) for end in other.ended]
        if not ended:
            return
        with self._phases.measure("commit"):
            if self._publisher is not None:
                self._publisher.commit_outcomes(ended, train_step=self._backend.policy_version)
                failpoint("trainer.after_ends")
            self._ranks.all_gather_bytes(b"")  # nobody goes on before it is committed
        self._decide_ended(share)

    def _decide_ended(self, share: RankStepResult) -> None:
        """Note that the prompt groups of the share that ended untrained do so in a transaction that
        is committed, or in the step's.
        """
        ended = share.ended
        self._assembler.mark_done([end.prompt_group_id for end in ended])
        for end in ended:
            self._worker.records.traces.record_group_end(
                end.prompt_group_id, outcome=end.outcome.value, reason=end.reason
            )
        if ended:
            log.info(
                "prompt_groups.ended",
                num_prompt_groups=len(ended),
                outcome=ended[0].outcome,
                reason=ended[0].reason,
            )

    def _choose(self, version: int, remaining: int) -> tuple[int, list[ReadyGroup]]:
        """Agree on the prompt groups of this round; return how many all ranks take, and those of
        this rank.
        """
        ready = self._assembler.ready()
        rows = self._ranks.all_gather_bytes(orjson.dumps(ready))
        everyone = [ReadyGroup(**row) for text in rows for row in orjson.loads(text)]
        chosen = select_groups(
            everyone, trainer_version=version, count=remaining, order=self._config.run.sample_order
        )
        if self._config.run.mode == "sync" and len(chosen) < remaining:
            return 0, []  # one order for all runs: nothing starts before everything is there
        mine = set(ready)
        return len(chosen), [group for group in chosen if group in mine]

    def _feed(self, group: ReadyGroup, batch: StepBatch) -> None:
        self._begin_trace(group, batch.share)
        records = self._assembler.take(group)
        try:
            with (
                self._phases.measure("decode"),
                self._worker.lifecycle.piece("read a prompt group"),
            ):
                samples = [self._placed(record) for record in records]
        except UNUSABLE as error:  # it could be had when its record came
            places = [(record.partition, record.offset) for record in records]
            batch.exclude(
                UntrainableGroup(group.prompt_group_id, group.policy_version, places, error)
            )
        else:
            batch.feed(samples)

    def _placed(self, record: Record) -> LocatedSample:
        """Decode a record again that was found trainable when it came, so that only the samples in
        training lie in memory with their arrays.
        """
        sample = check_ready(
            self._worker.records.fetch_arrays(self._worker.records.codec.decode(record.value))
        )
        return LocatedSample(sample, record.partition, record.offset)

    def _begin_trace(self, group: ReadyGroup, share: RankStepResult) -> None:
        traces, step = self._worker.records.traces, self._backend.policy_version
        traces.record_wait(group.prompt_group_id, "advantage.samples")
        staleness = step - group.policy_version
        self._in_training.append(
            traces.begin(
                "train",
                group.prompt_group_id,
                topic="advantage.samples",
                train_step=step,
                staleness=staleness,
            )
        )
        share.trace_headers.append(dict(traces.get_headers(group.prompt_group_id)))

    def _accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        started = time.monotonic()
        num_tokens, max_tokens = (
            sum(len(sample.tokens) for sample in micro_batch),
            self._config.trainer.max_tokens_per_micro_batch,
        )
        if (
            num_tokens > max_tokens
        ):  # nothing smaller can be cut: out of memory, this line names what it was
            longest = max(micro_batch, key=lambda sample: len(sample.tokens))
            log.warning(
                "micro_batch.above_budget",
                sample_id=longest.sample_id,
                num_tokens=num_tokens,
                max_tokens=max_tokens,
            )
        with (
            self._phases.measure("forward_backward"),
            self._worker.lifecycle.piece("train a micro-batch"),
        ):
            self._backend.accumulate(micro_batch)
        self._worker.metrics.tokens(num_tokens)
        self._worker.lifecycle.record_processed(len(micro_batch), started)
        self._worker.lifecycle.record_progress()
        self._settle(wait=False)

    def _progress_in_step(self) -> None:
        """Beat, and commit the step before once its weights are written, while a step that had to
        be whole is trained.
        """
        self._worker.lifecycle.record_progress()
        self._settle(wait=False)

    def _finish_step(self, share: RankStepResult) -> None:
        """Update, write weights, commit; only then are the step's records decided."""
        step = self._backend.policy_version
        figures = self._update(step)
        self._poll_checkpoint()
        self._settle()
        if self._follower is not None:
            self._follower.commit_steps()
        with self._phases.measure("weights"), self._worker.lifecycle.transfer("write weights"):
            tensors = self._backend.weights()
            if self._publisher is not None:
                self._publisher.write_weights(tensors, policy_version=step + 1)
        self._assembler.mark_done(share.prompt_group_ids)
        share.ended = self._assembler.pending_outcomes()
        self._decide_ended(share)
        for work in self._in_training:
            work.end()
        share.consumed = self._consumed()
        self._shares = self._gather(share)
        if self._publisher is not None:
            self._publisher.set_trained_step(
                TrainedStep(
                    step,
                    self._shares,
                    figures,
                    self._phases.snapshot(),
                    self._checkpoint,
                    self._began_ns,
                )
            )
        if self._follower is not None and self._in_hand is not None:
            self._follower.add_trained_step(self._in_hand.step, self._checkpoint)
        if not self._config.weights.async_publish:
            self._settle()
        self._save_checkpoint()

    def _consumed(self) -> list[TopicOffset]:
        """Return up to where all records are decided; those that became dead letters are safe as
        such by then.
        """
        with self._worker.lifecycle.piece("write dead letters"):
            self._worker.records.flush_dead_letters()
        return self._assembler.consumed()

    def _update(self, step: int) -> dict[str, float] | None:
        """Update the weights and return the step's figures; None where it has none, since the
        update is skipped. All ranks do the same.
        """
        with self._phases.measure("update"), self._worker.lifecycle.piece("step the optimizer"):
            try:
                return self._backend.step().to_metrics(of_engine=self._config.algorithm.has_rewards)
            except StepNotFinite as error:
                log.error("update.skipped", train_step=step, error=str(error))
                self._backend.skip_step()
                return None

    def _gather(self, share: RankStepResult) -> list[RankStepResult]:
        if self._ranks.size == 1:
            return [share]
        return [
            RankStepResult.from_bytes(data)
            for data in self._ranks.all_gather_bytes(share.to_bytes())
        ]

    def _poll_checkpoint(self) -> None:
        if self._pending is not None and (reference := self._pending.poll()) is not None:
            self._pending, self._checkpoint = None, reference
            log.info("checkpoint.written", policy_version=reference.policy_version)

    def _checkpoint_is_due(self, version: int) -> bool:
        """Return whether a checkpoint is due by steps, or by rank 0's clock; all ranks get the same
        answer.
        """
        seconds = time.monotonic() - self._checkpoint_begun
        is_due = self._config.trainer.checkpoint_is_due(version, seconds=seconds)
        if self._ranks.size == 1:
            return is_due
        return self._ranks.broadcast(bytes([is_due]) if self._ranks.rank == 0 else None) == bytes(
            [True]
        )

    def _save_checkpoint(self) -> None:
        """Start a checkpoint when one is due. It becomes real when a later step's record names
        it.
        """
        version = self._backend.policy_version
        if self._pending is not None or not self._checkpoint_is_due(version):
            return
        self._checkpoint_begun = time.monotonic()
        extra = {
            "consumed": [
                [TopicPlan.parse_entity(at.topic), at.partition, at.offset]
                for share in self._shares
                for at in share.consumed
            ],
            "id_window": self._assembler.done_group_ids(),
            "forgotten_step": self._assembler.forgotten_step,
        }
        with (
            self._phases.measure("checkpoint"),
            self._worker.lifecycle.transfer("copy the checkpoint"),
        ):
            self._pending = self._checkpoints.save(self._backend.state(), extra=extra)
