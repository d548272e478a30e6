"""The trainer: takes prompt groups as they become ready, updates the policy, publishes each
version.

    advantage.samples, prompt.end-requests
      ──▶ assemble prompt groups ──▶ agree with the other ranks on the batch
      ──▶ forward and backward by micro-batches ──▶ update
      ──▶ weights to the object store
      ──▶ one transaction: step, outcomes, version, offsets ──▶ control.*

Each data-parallel rank reads the shards `shard mod ranks == rank` of every slot and waits for
records; a round of small collectives counts how many prompt groups the ranks hold together, so that
the step ends at the exact count. One rank alone trains prompt groups as they come. Several ranks
wait for a whole step, plan it, and move samples so that all have equal work (see
`training/batch/balanced_batches.py`). Offsets are committed with the step that used their records.
After a crash the recorded steps since the last checkpoint are trained again.

A replay (`parent.run`) has no samples of its own: it trains the batches of its parent's committed
steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import structlog

from relax_events.config import RunConfig, TrainerConfig
from relax_events.config.topology import Topology
from relax_events.errors import ConfigError, OutOfMemory, StepNotFinite
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleReady
from relax_events.kafka.log_reader import LogReader
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.projections.training_history import TrainingHistory
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.run_description import ParentRun
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.topics.names import EVALUATIONS, TRAINING_SAMPLES
from relax_events.training.backend.factory import open_backend
from relax_events.training.backend.learning_rate import holds_policy
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.backend.step_sums import require_agreement
from relax_events.training.backend.weight_stream import weight_parts
from relax_events.training.batch.assembly import BatchAssembler
from relax_events.training.batch.balanced_batches import BalancedBatches
from relax_events.training.batch.batch_opener import BatchOpener
from relax_events.training.batch.live_batches import IDLE_SECONDS, LiveBatches
from relax_events.training.batch.paths import longest_path
from relax_events.training.batch.sample_intake import SampleIntake
from relax_events.training.checkpoint.checkpoints import Checkpoints, CheckpointSchedule
from relax_events.training.checkpoint.pending import PendingCheckpoint
from relax_events.training.device_turns import DeviceTurns
from relax_events.training.distributed import open_ranks, wait_visibly
from relax_events.training.publishing import StepPublisher, TrainedStep
from relax_events.training.ranks import Ranks
from relax_events.training.replay.follower_position import FollowerPosition
from relax_events.training.replay.parent_steps import (
    RecordedTraining,
    ReplaySource,
    open_recorded_batches,
)
from relax_events.training.replay.recorded_batches import RecordedBatches
from relax_events.training.replay.recovery import Recovery
from relax_events.training.smaller_steps import SmallerSteps
from relax_events.training.step_commits import StepCommits
from relax_events.training.step_record import RankStepResult

log = structlog.get_logger()


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop. This process may be one of several ranks: `relax run`
    passes the rank as the index, torchrun in the environment.
    """
    store = open_store(config)
    with open_ranks(
        timeout_seconds=config.trainer.collective_timeout_seconds,
        lay_out=lambda num_ranks: lay_out_ranks(config.trainer, num_ranks),
    ) as ranks:
        telemetry = config.telemetry.model_copy(
            update={"metrics_port": config.telemetry.worker_port(ranks.local_rank)}
        )
        config = config.model_copy(update={"telemetry": telemetry})
        followed = (EVALUATIONS,) if config.weights.keep_best else ()
        with open_worker(
            "trainer", config, index=index or ranks.rank, store=store, follow=followed
        ) as worker:
            timeout = config.trainer.collective_timeout_seconds
            wait_visibly(ranks, worker.lifecycle, timeout_seconds=timeout)
            turns = DeviceTurns(worker, ranks)
            if not turns.has_device:
                return
            backend = open_backend(config, ranks)
            turns.share(backend)
            TrainLoop(worker, backend, ranks, store, turns).run()


def lay_out_ranks(trainer: TrainerConfig, num_ranks: int) -> Topology:
    """Return how the ranks that a launcher started are laid out.

    Args:
        trainer: The run file's section.
        num_ranks: Number of started ranks: `WORLD_SIZE` of the launcher, 1 without a launcher.
    Raises:
        ConfigError: The run file names another number, by which the run was planned.
    """
    if num_ranks != trainer.ranks:
        raise ConfigError(
            f"trainer.ranks = {trainer.ranks}, and {num_ranks} "
            f"{'was' if num_ranks == 1 else 'were'} started; start as many, for example with "
            f"torchrun --nnodes N --nproc-per-node M where N times M is {trainer.ranks}, or set "
            f"trainer.ranks = {num_ranks}"
        )
    return trainer.topology(num_ranks)


class TrainLoop:
    """See the module's docstring."""

    def __init__(
        self,
        worker: Worker,
        backend: TrainerBackend,
        ranks: Ranks,
        store: ObjectStore,
        turns: DeviceTurns,
    ) -> None:
        self._worker, self._config, self._backend = worker, worker.config, backend
        self._ranks, self._store, self._turns = ranks, store, turns
        self._topic = worker.plan.topic(TRAINING_SAMPLES)
        self._reader = LogReader(
            worker.connection, consumer_group=worker.plan.consumer_group("trainer")
        )
        worker.lifecycle.track_lag(self._reader)
        self._library = MediaLibrary(self._config, store=store)
        self._checkpoints = Checkpoints(
            store, ranks=ranks, keep=self._config.trainer.keep_checkpoints
        )
        self._opener = BatchOpener(
            self._config,
            ranks,
            self._accumulate,
            backend.discard,
            self._set_max_cells,
            SmallerSteps(store, ranks),
        )
        self._shares: list[RankStepResult] = []
        self._schedule = CheckpointSchedule(self._checkpoints, ranks, self._config.trainer)
        self._began_ns = 0
        backend.on_progress(worker.lifecycle.record_progress)  # until a step can be committed
        self._source = (
            ParentRun.read(worker.connection, self._config.parent.run, child_config=self._config)
            if self._config.parent.run
            else None
        )
        begin = self._source.config.first_version if self._source and self._config.is_replay else 0
        self._first_policy_step = self._config.first_policy_step + begin
        self._batches: RecordedBatches | None = None
        self._recorded: RecordedTraining | None = None
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
        )  # from here an earlier trainer is fenced, so all ranks read the same history
        if is_first and self._config.is_replay:
            self._follower = FollowerPosition(worker)
            self._follower.retain_all()
        num_recovered = self._recover()
        self._turns.end()
        self._schedule.restart_clock()
        worker.control.follow(*([] if self._publisher is None else [self._publisher.best.apply]))
        try:
            while self._backend.policy_version < self._config.last_version and self._train_step():
                pass
            self._commits.commit_step()
            is_at_goal = self._backend.policy_version >= self._config.last_version
            if self._follower is not None and is_at_goal:
                self._follower.release_all()
            log.info(
                "trainer.finished",
                policy_version=self._backend.policy_version,
                num_recovered_steps=num_recovered,
            )
            if is_at_goal and self._recorded is None and self._config.run.sample_order == "fifo":
                self._live.end_left(self._backend.policy_version)
            while not self._commits.agree_to_drain():
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
        """Restore weights, optimizer and positions to the state of the log; return how many steps
        the run has committed.
        """
        history = TrainingHistory.read(self._worker)
        recovery = Recovery(history, self._worker, self._backend, self._ranks, store=self._store)
        self._schedule.written = recovery.load_start(self._checkpoints, source=self._source)
        if self._source is not None and self._config.is_replay:
            self._batches = open_recorded_batches(self._worker, self._source, self._ranks)
        recovery.train_missing_steps(self._batches)
        self._build_step_parts(history)
        self._open_batches(history)
        recovery.publish_missing_weights(self._publisher)
        self._opener.smaller.read(self._backend.policy_version)
        return history.num_steps

    def _build_step_parts(self, history: TrainingHistory) -> None:
        """Build what reads, assembles and commits the samples of a step, as of the log's end."""
        self._assembler = BatchAssembler(
            max_staleness=self._config.run.max_staleness,
            decided=set(history.ended_group_ids),
            forgotten_step=history.forgotten_step,
            in_order=self._config.run.sample_order == "fifo",
        )
        self._intake = SampleIntake(
            self._worker,
            self._backend,
            self._assembler,
            library=self._library,
            topic=self._topic,
            keeps_decoded=not self._opener.is_in_rounds,
        )
        self._commits = StepCommits(
            self._worker,
            self._backend,
            self._ranks,
            publisher=self._publisher,
            assembler=self._assembler,
        )
        self._backend.on_progress(self._progress_in_step)
        at_start = self._backend.policy_version <= self._config.first_policy_step
        self._has_start_weights = at_start and not self._config.is_replay
        make = BalancedBatches if self._opener.is_in_rounds else LiveBatches
        self._live = make(
            self._worker,
            self._reader,
            self._opener,
            assembler=self._assembler,
            intake=self._intake,
            commits=self._commits,
            turns=self._turns,
        )

    def _open_batches(self, history: TrainingHistory) -> None:
        """Resume at our own positions, or after the last parent step that we trained."""
        if self._source is not None and self._batches is not None:
            first, last = self._backend.policy_version, self._config.last_version
            self._recorded = RecordedTraining(
                self._worker,
                ReplaySource(self._source, self._batches, first=first, last=last),
                self._opener,
                intake=self._intake,
                commits=self._commits,
            )
            return
        self._live.assign(history.positions())

    def _train_step(self) -> bool:
        """Train one step; return False when the drain cut it short (its records stay undecided and
        will be read again).
        """
        version = self._backend.policy_version
        self._commits.phases = self._commits.phases.next_step()
        self._began_ns = time.time_ns()
        share = (self._recorded or self._live).fill(version)
        if share is None:
            return False
        failpoint("trainer.after_accumulate")
        self._finish_step(share)
        return True

    @property
    def _is_held(self) -> bool:
        """Whether only the critic learns from the current step."""
        batch = self._recorded.current if self._recorded is not None else None
        step, recorded = self._backend.policy_version, batch.step if batch else None
        return holds_policy(self._first_policy_step, step=step, recorded=recorded)

    def _accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        accumulate = self._backend.check if self._is_held else self._backend.accumulate
        if not micro_batch:  # of a round in which other ranks have one
            accumulate(micro_batch)
            self._progress_in_step()
            return
        started = time.monotonic()
        num_tokens = sum(len(sample.tokens) for sample in micro_batch)
        longest = max(micro_batch, key=longest_path)
        max_tokens = self._config.trainer.max_tokens_per_micro_batch
        if longest_path(longest) > max_tokens:  # a path can't be split
            log.warning(
                "path.above_budget",
                sample_id=longest.sample_id,
                num_tokens=longest_path(longest),
                max_tokens=max_tokens,
            )
        with (
            self._commits.phases.measure("forward_backward"),
            self._worker.lifecycle.piece("train a micro-batch"),
        ):
            accumulate(micro_batch)
        if self._ranks.at.is_data_leader:
            self._worker.metrics.count_tokens(num_tokens)
        self._worker.lifecycle.record_processed(len(micro_batch), started)
        self._worker.lifecycle.record_progress()
        self._commits.commit_step(wait=False)

    def _set_max_cells(self, max_cells: int) -> None:
        self._backend.max_cells = max_cells

    def _progress_in_step(self) -> None:
        """Send a heartbeat, and commit the step before once its weights are written, during a long
        optimizer step.
        """
        self._worker.lifecycle.record_progress()
        self._commits.commit_step(wait=False)

    def _finish_step(self, share: RankStepResult) -> None:
        """Update, write weights, commit; only then are the step's records decided."""
        step, is_held = self._backend.policy_version, self._is_held
        metrics = None if is_held else self._update(step)
        if is_held:
            log.info("update.held", train_step=step, until_step=self._first_policy_step)
            self._backend.skip_step()
        self._schedule.poll()
        self._commits.commit_step()
        if self._follower is not None:
            self._follower.commit_steps()
        with (
            self._commits.phases.measure("weights"),
            self._worker.lifecycle.transfer("write weights"),
        ):
            parts = weight_parts(self._backend)
            if self._publisher is not None:
                self._publisher.write_weights(parts, policy_version=step + 1)
            deque(parts, maxlen=0)  # every rank takes part
        self._assembler.mark_done(share.prompt_group_ids)
        share.ended = self._assembler.pending_outcomes()
        self._commits.mark_ended(share)
        self._live.end_traces()
        share.consumed = self._consumed()
        self._shares = self._commits.gather(share)
        if self._publisher is not None:
            self._publisher.set_trained_step(
                TrainedStep(
                    step,
                    self._shares,
                    metrics,
                    self._commits.phases.snapshot(),
                    self._schedule.written,
                    self._began_ns,
                    is_held,
                )
            )
        recorded = self._recorded
        if self._follower is not None and recorded is not None and recorded.current is not None:
            self._follower.add_trained_step(recorded.current.step, self._schedule.written)
        if self._turns.are_taken:  # all that reads the model comes before the engines' turn
            self._schedule.start_if_due(self._backend.policy_version, self._start_checkpoint)
            self._turns.end()
        if not self._config.publishes_in_background:
            self._commits.commit_step()
        if not self._turns.are_taken:
            self._schedule.start_if_due(self._backend.policy_version, self._start_checkpoint)

    def _consumed(self) -> list[TopicOffset]:
        """Flush the dead letters; return the offsets below which all records are decided."""
        with self._worker.lifecycle.piece("write dead letters"):
            self._worker.records.flush_dead_letters()
        return self._assembler.consumed()

    def _update(self, step: int) -> dict[str, float] | None:
        """Update the weights and return the step's metrics; None if the update is skipped.

        All ranks decide the same.
        """
        with (
            self._commits.phases.measure("update"),
            self._worker.lifecycle.piece("step the optimizer"),
        ):
            try:
                taken = self._backend.step()
            except StepNotFinite as error:
                log.error("update.skipped", train_step=step, error=str(error))
                self._backend.skip_step()
                return None
            except OutOfMemory as error:  # other ranks wait, or the weights have moved
                failpoint("trainer.step_out_of_memory")
                budget = self._config.trainer.max_tokens_per_micro_batch
                self._opener.smaller.write(step, error, budget=budget)
                raise
        has_engine = self._config.algorithm.has_rewards
        if has_engine and self._has_start_weights:
            bound = self._config.trainer.max_start_mismatch
            require_agreement(taken, bound=bound, policy_version=step, ranks=self._ranks)
        self._has_start_weights = False
        return taken.to_metrics(of_engine=has_engine)

    def _start_checkpoint(self) -> PendingCheckpoint:
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
            self._commits.phases.measure("checkpoint"),
            self._worker.lifecycle.transfer("copy the checkpoint"),
        ):
            return self._checkpoints.save(self._backend.state(), extra=extra)
