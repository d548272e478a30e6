"""The trainer: takes prompt groups as they become ready, updates the policy, publishes each version.

    advantage.samples ──▶ assemble prompt groups ──▶ agree with the other ranks ──▶ micro-batches ──▶ forward, backward
                                                                                                            │
    control.* ◀── one transaction: step, outcomes, version, offsets ◀── weights to the object store ◀── update ◀┘

Each rank reads the shards `shard mod ranks == rank` of every slot and waits for records; a round of small collectives
tells how many prompt groups the ranks hold together, so that the step ends at the exact count. Offsets become real with
the step that used their records. After a crash the recorded steps since the last checkpoint are trained again.

A replay (`source.run`) has no samples of its own: it waits for the steps that its source committed and trains their batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson
import structlog

from relax_events.broker.consumer import LogReader
from relax_events.broker.records import Record
from relax_events.config import RunConfig
from relax_events.errors import ConfigError, CorruptRecord, PoisonSample
from relax_events.events.parts import CheckpointRef
from relax_events.events.types import PromptGroupEnded, SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.pipeline.failpoints import failpoint
from relax_events.pipeline.source_run import SourceRun
from relax_events.pipeline.validation import check_ready, check_trainable
from relax_events.pipeline.worker import Worker
from relax_events.policy import IssuedGroup, ReadyGroup, select_groups
from relax_events.telemetry.traces import Work
from relax_events.training.assembly import GroupAssembler, PlacedSample
from relax_events.training.checkpoints import Checkpoints
from relax_events.training.distributed import open_ranks
from relax_events.training.history import TrainingHistory
from relax_events.training.packing import MicroBatcher
from relax_events.training.pending_checkpoint import PendingCheckpoint
from relax_events.training.phases import Phases
from relax_events.training.protocol import TrainerBackend, TrainerState
from relax_events.training.publishing import StepPublisher, TrainedStep
from relax_events.training.ranks import Ranks
from relax_events.training.recorded_batches import RecordedBatches
from relax_events.training.replay import Replay
from relax_events.training.source_steps import SourceSteps, open_batches
from relax_events.training.starting import read_start
from relax_events.training.step_record import StepShare
from relax_events.weights.transport import StoreTransport
from workers.backends import open_backend
from workers.opening import open_store, open_worker

log = structlog.get_logger()
IDLE_SECONDS = 0.5
ROUND_SECONDS = 0.1
FIRST_CHECKPOINT_SECONDS = 600.0


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop. Under torchrun this process is one rank of several."""
    store = open_store(config)
    with open_ranks(timeout_seconds=config.trainer.collective_timeout_seconds) as ranks:
        telemetry = config.telemetry.model_copy(update={"metrics_port": config.telemetry.port_of(ranks.rank)})
        config = config.model_copy(update={"telemetry": telemetry})
        with open_worker("trainer", config, index=index + ranks.rank, store=store) as worker:
            backend = open_backend(config, ranks)
            TrainLoop(worker, backend, ranks, store).run()


class TrainLoop:
    """See the module's docstring."""

    def __init__(self, worker: Worker, backend: TrainerBackend, ranks: Ranks, store: ObjectStore) -> None:
        self._worker, self._config, self._backend, self._ranks, self._store = worker, worker.config, backend, ranks, store
        self._topic = worker.plan.topic("advantage.samples")
        self._reader = LogReader(worker.connection, consumer_group=worker.plan.consumer_group("trainer"))
        worker.reads(self._reader)
        self._library = MediaLibrary(self._config, store=store)
        self._checkpoints = Checkpoints(store, ranks=ranks, keep=self._config.trainer.keep_checkpoints)
        self._shares: list[StepShare] = []
        self._pending: PendingCheckpoint | None = None
        self._checkpoint: CheckpointRef | None = None
        self._is_ahead = False
        self._phases = Phases()
        self._began_ns = 0
        self._in_training: list[Work] = []
        self._source = SourceRun.read(worker.connection, self._config.source.run) if self._config.source.run else None
        self._batches: RecordedBatches | None = None
        self._recorded: SourceSteps | None = None

    def run(self) -> None:
        """Recover, then train until the goal or the drain."""
        worker = self._worker
        is_first = self._ranks.rank == 0
        self._publisher = StepPublisher(worker, self._reader, store=self._store, checkpoints=self._checkpoints) if is_first else None
        self._ranks.all_gather_bytes(b"")  # only now is an earlier trainer fenced, and the history the same for all ranks
        history = self._recover()
        worker.follow()
        try:
            while self._backend.policy_version < self._config.last_version and self._train_step():
                pass
            self._settle()
            log.info("trainer.finished", policy_version=self._backend.policy_version, num_recovered_steps=len(history.steps))
            while not self._agree_to_drain():
                worker.tick(working=False)
                worker.drain.wait(IDLE_SECONDS)
        finally:
            self._checkpoints.close()
            self._reader.close()
            if self._recorded is not None:
                self._recorded.close()
            if self._publisher is not None:
                self._publisher.close()

    def _recover(self) -> TrainingHistory:
        """Bring weights, optimizer and positions to where the log says that training stands."""
        history = TrainingHistory.read(self._worker)
        self._checkpoint = history.checkpoint()
        if self._checkpoint is not None:
            restored = self._checkpoints.load(self._checkpoint)
            self._backend.load_state(restored.state)
            history.take_checkpoint(restored.extra)
            log.info("checkpoint.loaded", policy_version=self._backend.policy_version)
        elif self._source is not None:
            self._start_from(self._source)
        if self._source is not None and self._config.is_replay:
            self._batches = open_batches(self._worker, self._source, self._ranks)
        missing = [step for step in history.steps if step.train_step >= self._backend.policy_version]
        if not Replay(self._worker, self._backend, self._ranks, batches=self._batches).run(missing):
            self._take_published(history)
        decided = set(history.ended_group_ids)
        self._assembler = GroupAssembler(topic=self._topic, max_staleness=self._config.run.max_staleness, decided=decided)
        self._open_batches(history)
        tensors = self._backend.weights() if history.is_fresh else {}
        if self._publisher is not None:
            if history.is_fresh:
                self._publisher.publish_initial(tensors, policy_version=self._config.first_version)
            self._publisher.forget_unwanted(self._backend.policy_version)
        return history

    def _start_from(self, source: SourceRun) -> None:
        """Take over the source's weights; a checkpoint of our own makes us independent of how long it keeps them."""
        version = self._config.first_version
        start = read_start(source, version, ranks=self._ranks)
        if start is None:
            return
        tensors = {**self._backend.state().tensors, **start.state.tensors}
        self._backend.load_state(TrainerState(policy_version=version, tensors=tensors))
        self._checkpoint = self._checkpoints.save(self._backend.state(), extra={"consumed": [], "id_window": []}).wait(FIRST_CHECKPOINT_SECONDS)
        log.info("source.loaded", source_run=source.config.run.id, policy_version=version, kind=start.kind)

    def _open_batches(self, history: TrainingHistory) -> None:
        """Go on where the log says: at our own positions, or behind the last step of the source that we trained."""
        if self._source is not None and self._batches is not None:
            first, last = self._backend.policy_version, self._config.last_version
            self._recorded = SourceSteps(self._source, self._batches, first=first, last=last)
            return
        positions = history.positions()
        mine = [partition for partition in range(self._worker.plan.num_sample_partitions) if self._owns(partition)]
        self._reader.assign({(self._topic, partition): positions.get(partition, 0) for partition in mine})

    def _owns(self, partition: int) -> bool:
        return partition % self._worker.plan.shards % self._ranks.size == self._ranks.rank

    def _take_published(self, history: TrainingHistory) -> None:
        """Where kernels are not deterministic, replay ends beside the published weights: those are the truth."""
        published = StoreTransport(self._store).fetch(history.published[-1])
        state = self._backend.state()
        tensors = {**state.tensors, **{f"model.{name}": tensor for name, tensor in published.tensors.items()}}
        self._backend.load_state(TrainerState(policy_version=state.policy_version, tensors=tensors))
        log.warning("replay.diverged", policy_version=state.policy_version, taken="published weights")

    def _train_step(self) -> bool:
        """Train one step; return False when the drain cut it short (its records stay undecided and will be read again)."""
        version = self._backend.policy_version
        share = StepShare(self._ranks.rank)
        self._phases = self._phases.successor()
        self._began_ns, self._in_training = time.time_ns(), []
        is_whole = self._train_live(version, share) if self._recorded is None else self._train_recorded(self._recorded, share)
        if is_whole:
            failpoint("trainer.after_accumulate")
            self._finish_step(share)
        return is_whole

    def _train_live(self, version: int, share: StepShare) -> bool:
        """Take prompt groups as they become ready, until the ranks hold a step's; False when the drain came first."""
        batcher = self._micro_batcher()
        placed: dict[str, PlacedSample] = {}
        remaining = self._config.run.groups_per_step
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
                self._feed(group, batcher, placed, share)
            self._worker.tick(working=taken > 0)
        self._accumulate(batcher.flush(), placed, share)
        return True

    def _train_recorded(self, recorded: SourceSteps, share: StepShare) -> bool:
        """Train what the source trained in this step, in its order; False when the drain came before the source's step."""
        while not self._agree_to_drain():
            if self._agree_on_next(recorded):
                break
            self._worker.tick(working=False)
        else:
            return False
        with self._phases.measure("decode"):
            batch = recorded.take()
        batcher = self._micro_batcher()
        placed = {item.sample.sample_id: item for item in batch.samples}
        mine = {item.sample.prompt_group_id for item in batch.samples}
        share.prompt_group_ids = [group_id for group_id in batch.step.prompt_group_ids if group_id in mine]
        try:
            for micro_batch in batcher.feed(self._trainable(item.sample) for item in batch.samples):
                self._accumulate(micro_batch, placed, share)
        except PoisonSample as error:
            raise ConfigError(f"the rollouts of run {self._config.source.run} can't be trained with these settings: {error}") from error
        self._accumulate(batcher.flush(), placed, share)
        self._worker.tick(working=True)
        return True

    def _micro_batcher(self) -> MicroBatcher:
        max_tokens, whole = self._config.trainer.max_tokens_per_micro_batch, self._config.algorithm.needs_whole_groups
        return MicroBatcher(max_tokens=max_tokens, whole_prompt_groups=whole)

    def _agree_on_next(self, recorded: SourceSteps) -> bool:
        """Return whether every rank sees the source's next step; all ranks get the same answer."""
        with self._phases.measure("wait"):
            mine = recorded.has_next(timeout_seconds=IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS)
        return all(flag == b"1" for flag in self._ranks.all_gather_bytes(b"1" if mine else b"0"))

    def _read(self, version: int, *, wait: bool) -> None:
        """Hand new records to the assembler; wait for some only when there was nothing left to train."""
        seconds = IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS
        with self._phases.measure("wait"):
            records = self._reader.fetch(1000, timeout_seconds=seconds if wait else 0.0)
        with self._phases.measure("decode"):
            for record in records:
                self._take(record, version)

    def _take(self, record: Record, version: int) -> None:
        event = self._worker.decode(record)
        reason = "record could not be decoded"
        if isinstance(event, PromptGroupEnded):
            self._assembler.add(record, event, trainer_version=version)
            return
        if event is not None:
            try:
                self._assembler.add(record, self._trainable(check_ready(event)), trainer_version=version)
            except PoisonSample as error:
                self._worker.dead_letter(record, error)
                reason = f"poison: {error}"
            else:
                return
        try:
            IssuedGroup.parse(record.key)
        except CorruptRecord:
            self._assembler.skip(record)
        else:
            self._assembler.reject(record, reason, trainer_version=version)

    def _trainable(self, sample: SampleReady) -> SampleReady:
        """Return a sample that can be trained, its media at hand; raises PoisonSample as `check_trainable`, or where its media can't be had."""
        self._library.require(sample.media)
        backend = self._backend
        return check_trainable(sample, algorithm=self._config.algorithm, vocab_size=backend.vocab_size, experts=backend.experts)

    def _agree_to_drain(self) -> bool:
        """Return whether any rank was asked to end, and note whether the step before is still uncommitted; all ranks get the same answer."""
        self._settle(wait=False)
        is_ahead = self._publisher is not None and self._publisher.is_behind
        flags = self._ranks.all_gather_bytes(bytes([self._worker.drain.requested, is_ahead]))
        self._is_ahead = any(flag[1] for flag in flags)
        return any(flag[0] for flag in flags)

    def _settle(self, *, wait: bool = True) -> None:
        """Commit the step before, if it is not: its weights were written beside this one."""
        publisher = self._publisher
        if publisher is None or not publisher.is_behind or not (wait or publisher.is_written):
            return
        with self._phases.measure("weights"):
            publisher.await_written()
        with self._phases.measure("commit"):
            publisher.settle()

    def _commit_ends(self) -> None:
        """Commit prompt groups that ended untrained, at once, so that the prompter can fill their seats; but after the step before."""
        if self._is_ahead:
            return
        share = StepShare(self._ranks.rank, ended=self._assembler.pending_ends())
        ended = [end for other in self._gather(share) for end in other.ended]
        if not ended:
            return
        with self._phases.measure("commit"):
            if self._publisher is not None:
                self._publisher.commit_outcomes(ended, train_step=self._backend.policy_version)
                failpoint("trainer.after_ends")
            self._ranks.all_gather_bytes(b"")  # nobody goes on before it is committed
        self._assembler.decide([end.prompt_group_id for end in share.ended])
        for end in share.ended:
            self._worker.traces.ended(end.prompt_group_id, outcome=end.outcome.value, reason=end.reason)
        log.info("prompt_groups.ended", num_prompt_groups=len(ended), outcome=ended[0].outcome, reason=ended[0].reason)

    def _choose(self, version: int, remaining: int) -> tuple[int, list[ReadyGroup]]:
        """Agree on the prompt groups of this round; return how many all ranks take, and those of this rank."""
        ready = self._assembler.ready()
        rows = self._ranks.all_gather_bytes(orjson.dumps(ready))
        everyone = [ReadyGroup(**row) for text in rows for row in orjson.loads(text)]
        chosen = select_groups(everyone, trainer_version=version, count=remaining, order=self._config.run.batch_order)
        if self._config.run.mode == "sync" and len(chosen) < remaining:
            return 0, []  # one order for all runs: nothing starts before everything is there
        mine = set(ready)
        return len(chosen), [group for group in chosen if group in mine]

    def _feed(self, group: ReadyGroup, batcher: MicroBatcher, placed: dict[str, PlacedSample], share: StepShare) -> None:
        share.prompt_group_ids.append(group.prompt_group_id)
        self._begin_trace(group, share)
        taken = self._assembler.take(group)
        placed |= {item.sample.sample_id: item for item in taken}
        for micro_batch in batcher.feed(item.sample for item in taken):
            self._accumulate(micro_batch, placed, share)

    def _begin_trace(self, group: ReadyGroup, share: StepShare) -> None:
        traces, step = self._worker.traces, self._backend.policy_version
        traces.waited(group.prompt_group_id, "advantage.samples")
        staleness = step - group.policy_version
        self._in_training.append(traces.begin("train", group.prompt_group_id, topic="advantage.samples", train_step=step, staleness=staleness))
        share.trace_headers.append(dict(traces.headers_of(group.prompt_group_id)))

    def _accumulate(self, micro_batch: Sequence[SampleReady] | None, placed: dict[str, PlacedSample], share: StepShare) -> None:
        if not micro_batch:
            return
        started = time.monotonic()
        with self._phases.measure("forward_backward"):
            self._backend.accumulate(micro_batch)
        share.note([placed[sample.sample_id] for sample in micro_batch], trainer_version=self._backend.policy_version)
        self._worker.metrics.tokens(sum(len(sample.tokens) for sample in micro_batch))
        self._worker.finished(len(micro_batch), started)
        self._settle(wait=False)

    def _finish_step(self, share: StepShare) -> None:
        """Update, write weights, commit; only then are the step's records decided."""
        step = self._backend.policy_version
        with self._phases.measure("update"):
            figures = self._backend.step().as_figures(of_engine=self._config.algorithm.has_rewards)
        self._poll_checkpoint()
        self._settle()
        with self._phases.measure("weights"):
            tensors = self._backend.weights()
            if self._publisher is not None:
                self._publisher.write(tensors, policy_version=step + 1)
        self._assembler.decide(share.prompt_group_ids)
        for work in self._in_training:
            work.end()
        share.consumed = self._assembler.consumed()
        self._shares = self._gather(share)
        if self._publisher is not None:
            self._publisher.trained(TrainedStep(step, self._shares, figures, self._phases.written(), self._checkpoint, self._began_ns))
        if not self._config.weights.overlap:
            self._settle()
        self._save_checkpoint()

    def _gather(self, share: StepShare) -> list[StepShare]:
        if self._ranks.size == 1:
            return [share]
        return [StepShare.from_bytes(data) for data in self._ranks.all_gather_bytes(share.to_bytes())]

    def _poll_checkpoint(self) -> None:
        if self._pending is not None and (reference := self._pending.poll()) is not None:
            self._pending, self._checkpoint = None, reference
            log.info("checkpoint.written", policy_version=reference.policy_version)

    def _save_checkpoint(self) -> None:
        """Start a checkpoint when one is due. It becomes real when a later step's record names it."""
        version = self._backend.policy_version
        if version % self._config.trainer.checkpoint_every or self._pending is not None:
            return
        extra = {
            "consumed": [[offset.partition, offset.offset] for share in self._shares for offset in share.consumed],
            "id_window": self._assembler.id_window(),
        }
        with self._phases.measure("checkpoint"):
            self._pending = self._checkpoints.save(self._backend.state(), extra=extra)
