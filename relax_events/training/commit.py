"""Commits train steps: one transaction with the step, its outcomes, the new version and the
offsets, after the weights are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import structlog

from relax_events.errors import Fenced
from relax_events.events.parts import CheckpointRef, ObjectRef, Outcome, TopicOffset
from relax_events.events.types import PolicyVersionPublished, PromptGroupEnded, TrainStepCommitted
from relax_events.kafka.admin import Admin
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.projections.training_history import TrainingHistory
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.publications import SUMMED_ENTITIES
from relax_events.runtime.worker import Worker
from relax_events.staleness import build_group_end, is_external
from relax_events.telemetry.traces import NO_HEADERS
from relax_events.topics.names import GROUP_OUTCOMES, POLICY_VERSIONS, TRAIN_STEPS
from relax_events.topics.partitions import TopicPartition
from relax_events.training.step_record import RankStepResult, StepRecord

log = structlog.get_logger()


class StepCommitter:
    """The one writer of control.train-steps, control.prompt-group-outcomes and
    control.policy-versions. Rank 0 only.

    Opening it fences every earlier trainer of the run: the broker rejects later writes of a zombie.
    """

    def __init__(self, worker: Worker, reader: LogReader) -> None:
        self._worker, self._reader = worker, reader
        self._transports: list[str] = sorted(
            {"store", worker.config.weights.transport}, reverse=True
        )
        self._admin = Admin(worker.connection)
        self._writer = TransactionalWriter(
            worker.connection,
            transactional_id=worker.plan.transactional_id("trainer"),
            partitions=[(worker.plan.topic(entity), 0) for entity in SUMMED_ENTITIES],
            consumer_group=worker.plan.consumer_group("trainer"),
        )
        self._control_offsets = self._control_offsets_in(
            self._admin.end_offsets(self._control_partitions)
        )  # no earlier trainer writes after this
        self._num_steps, self._ended = 0, Counter[str]()

    def resume(self, history: TrainingHistory) -> None:
        """Continue the run's counts from the log; publications carry the sums so far."""
        self._num_steps, self._ended = history.num_steps, history.outcomes

    def publish_initial(self, artifact: ObjectRef, *, policy_version: int = 0) -> None:
        """Publish the run's first version."""
        self._writer.commit(
            [self._version_record(policy_version, artifact)],
            is_already_committed=lambda: not self._history().is_fresh,
        )

    def commit_step(
        self,
        results: Sequence[RankStepResult],
        *,
        train_step: int,
        artifact: ObjectRef,
        digest: bytes,
        metrics: Mapping[str, float] | None,
        phase_seconds: Mapping[str, float],
        checkpoint: CheckpointRef | None,
        is_held: bool = False,
        step_headers: Mapping[str, str] = NO_HEADERS,
        version_headers: Mapping[str, str] = NO_HEADERS,
    ) -> TrainStepCommitted:
        """Commit a step with its outcomes, version and offsets; the step and version records carry
        their trace contexts.

        Without metrics, the step's update was skipped, or held while only the critic learns.
        """
        has_rewards = self._worker.config.algorithm.has_rewards
        record = StepRecord.merge(results, has_rewards=has_rewards)
        step = TrainStepCommitted(
            train_step=train_step,
            policy_version=train_step + 1,
            prompt_group_ids=record.prompt_group_ids,
            sample_ids=record.sample_ids,
            partitions=record.partitions,
            offsets=record.offsets,
            ranks=record.ranks,
            micro_batches=record.micro_batches,
            consumed=record.consumed,
            staleness_counts=record.staleness_counts,
            metrics={**(metrics or {}), **record.metrics},
            phase_seconds=dict(phase_seconds),
            weights_digest=digest,
            checkpoint=checkpoint,
            update_skipped=metrics is None and not is_held,
            update_held=is_held,
            max_cells=max(result.max_cells for result in results),
        )
        ended = [
            *(end for result in results for end in result.ended),
            *build_trained_outcomes(results, train_step, has_rewards=has_rewards),
        ]
        records = [
            self._worker.records.build(
                TRAIN_STEPS, step, key=str(train_step), headers=step_headers
            ),
            *(self._outcome_record(end) for end in ended),
            self._version_record(train_step + 1, artifact, headers=version_headers),
        ]
        self._writer.commit(
            records,
            offsets=record.consumed,
            reader=self._reader,
            is_already_committed=lambda: self._is_committed(step),
            before_commit=lambda: failpoint("trainer.in_transaction"),
        )
        self._num_steps += 1
        self._count_outcomes(ended)
        return step

    def commit_outcomes(self, ended: Sequence[PromptGroupEnded], *, train_step: int) -> None:
        """Commit outcomes that should not wait for the current train step, so that the prompter can
        fill their batch slots.

        Their offsets follow with the step: until then a restart reads the records again and drops
        them as done.
        """
        group_ids = {group.prompt_group_id for group in ended}
        self._writer.commit(
            [self._outcome_record(group) for group in ended],
            is_already_committed=lambda: self._are_committed(group_ids, train_step),
        )
        self._count_outcomes(ended)

    def _count_outcomes(self, ended: Sequence[PromptGroupEnded]) -> None:
        self._ended.update(
            end.outcome.value for end in ended if not is_external(end.prompt_group_id)
        )

    def _history(self) -> TrainingHistory:
        """Read the history since this trainer's last publication, or since it started."""
        return TrainingHistory.read_from(self._worker, self._control_offsets)

    def _is_committed(self, step: TrainStepCommitted) -> bool:
        """Return whether a commit with unknown outcome succeeded.

        Raises:
            Fenced: Another trainer committed this step; the step trained here is lost.
        """
        newer = [other for other in self._history().steps if other.train_step >= step.train_step]
        if newer and (
            len(newer) > 1
            or newer[0].weights_digest != step.weights_digest
            or newer[0].sample_ids != step.sample_ids
        ):
            raise Fenced(
                f"train step {step.train_step} was committed by another trainer; end this one"
            )
        return bool(newer)

    def _are_committed(self, group_ids: set[str], train_step: int) -> bool:
        """Return the same for outcomes, which are committed all or none; raises as
        `_is_committed`.
        """
        history = self._history()
        if any(step.train_step >= train_step for step in history.steps):
            raise Fenced(f"train step {train_step} was committed by another trainer; end this one")
        committed_ids = group_ids & history.ended_group_ids
        if committed_ids and committed_ids != group_ids:
            raise Fenced(
                f"the outcome of prompt group {min(committed_ids)} was committed by another "
                "trainer; end this one"
            )
        return bool(committed_ids)

    def _outcome_record(self, ended: PromptGroupEnded) -> ProducerRecord:
        self._worker.metrics.count_ended_group(ended.outcome)
        return self._worker.records.build(GROUP_OUTCOMES, ended, key=ended.prompt_group_id)

    def _version_record(
        self, version: int, artifact: ObjectRef, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> ProducerRecord:
        plan = self._worker.plan
        partitions = [
            (topic, partition)
            for topic in plan.sample_topics()
            for partition in plan.partitions_of_version(version)
        ]
        ends = self._admin.end_offsets([*self._control_partitions, *partitions])
        self._control_offsets = self._control_offsets_in(ends)
        event = PolicyVersionPublished(
            policy_version=version,
            artifact=artifact,
            transports=self._transports,
            # Records of the version follow its publication.
            start_offsets=[
                TopicOffset(*partition, ends[partition]) for partition in sorted(partitions)
            ],
            control_offsets=[
                TopicOffset(plan.topic(entity), 0, offset)
                for entity, offset in self._control_offsets.items()
            ],
            num_steps_before=self._num_steps,
            outcome_counts_before=dict(self._ended),
            takes_spares=self._worker.config.run.sample_order == "fifo",
        )
        return self._worker.records.build(POLICY_VERSIONS, event, key=str(version), headers=headers)

    @property
    def _control_partitions(self) -> dict[TopicPartition, str]:
        """The topics that only the trainer writes, and what they hold."""
        return {(self._worker.plan.topic(entity), 0): entity for entity in SUMMED_ENTITIES}

    def _control_offsets_in(self, ends: Mapping[TopicPartition, int]) -> dict[str, int]:
        """Return the end offsets of the topics that only the trainer writes, by what they hold."""
        return {entity: ends[at] for at, entity in self._control_partitions.items()}

    def close(self) -> None:
        """Close the clients."""
        self._writer.close()


def build_trained_outcomes(
    results: Sequence[RankStepResult], train_step: int, *, has_rewards: bool = True
) -> list[PromptGroupEnded]:
    """Return the outcomes of the prompt groups that a step trained, with mean rewards if any."""
    rewards: dict[str, list[float]] = {}
    versions: dict[str, int] = {}
    for result in results:
        for sample_id, reward, staleness in zip(
            result.sample_ids, result.rewards, result.staleness, strict=True
        ):
            group_id = sample_id.rpartition("/")[0]
            rewards.setdefault(group_id, []).extend([] if reward is None else [reward])
            versions[group_id] = min(train_step - staleness, versions.get(group_id, train_step))
    ended = []
    for result in results:
        for group_id in result.prompt_group_ids:
            values = rewards[group_id] if has_rewards else []
            mean_reward = sum(values) / len(values) if values else None
            ended.append(
                build_group_end(
                    group_id,
                    Outcome.TRAINED,
                    policy_version=versions[group_id],
                    trainer_version=train_step,
                    mean_reward=mean_reward,
                )
            )
    return ended
