"""Makes a step real: weights first, then one transaction with the step, its outcomes, the new
version and the offsets.
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
from relax_events.runtime.control_follower import SUMMED_ENTITIES
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.staleness import end_of, is_guest
from relax_events.telemetry.traces import NO_HEADERS
from relax_events.training.step_record import RankStepResult, StepRecord

log = structlog.get_logger()


class StepCommitter:
    """The one writer of control.train-steps, control.prompt-group-outcomes and
    control.policy-versions. Rank 0 only.

    Opening it fences every earlier trainer of the run: what a zombie writes afterwards is refused
    by the broker.
    """

    def __init__(self, worker: Worker, reader: LogReader) -> None:
        self._worker, self._reader = worker, reader
        self._transports: list[str] = sorted(
            {"store", worker.config.weights.transport}, reverse=True
        )
        self._admin = Admin(worker.connection)
        self._writer = TransactionalWriter(
            worker.connection, transactional_id=worker.plan.transactional_id("trainer")
        )
        self._control_offsets = (
            self._control_end_offsets()
        )  # no earlier trainer writes behind it any more
        self._num_steps, self._ended = 0, Counter[str]()

    def resume(self, history: TrainingHistory) -> None:
        """Count on from what the log says: publications sum up what lies before them."""
        self._num_steps, self._ended = history.num_steps, history.outcomes

    def publish_initial(self, artifact: ObjectRef, *, policy_version: int = 0) -> None:
        """Publish the version that the run begins with."""
        self._writer.commit(
            [self._version_record(policy_version, artifact)],
            already_real=lambda: not self._history().is_fresh,
        )

    def commit_step(
        self,
        shares: Sequence[RankStepResult],
        *,
        train_step: int,
        artifact: ObjectRef,
        digest: bytes,
        metrics: Mapping[str, float] | None,
        phase_seconds: Mapping[str, float],
        checkpoint: CheckpointRef | None,
        step_headers: Mapping[str, str] = NO_HEADERS,
        version_headers: Mapping[str, str] = NO_HEADERS,
    ) -> TrainStepCommitted:
        """Commit a step with everything that became true by it; its record and that of its version
        carry the contexts of their traces.

        Without metrics the step's update was skipped.
        """
        has_rewards = self._worker.config.algorithm.has_rewards
        layout = StepRecord.merge(shares, has_rewards=has_rewards)
        step = TrainStepCommitted(
            train_step=train_step,
            policy_version=train_step + 1,
            prompt_group_ids=layout.prompt_group_ids,
            sample_ids=layout.sample_ids,
            partitions=layout.partitions,
            offsets=layout.offsets,
            ranks=layout.ranks,
            micro_batches=layout.micro_batches,
            consumed=layout.consumed,
            staleness_counts=layout.staleness_counts,
            metrics={**(metrics or {}), **layout.metrics},
            phase_seconds=dict(phase_seconds),
            weights_digest=digest,
            checkpoint=checkpoint,
            update_skipped=metrics is None,
        )
        ended = [
            *(end for share in shares for end in share.ended),
            *build_trained_outcomes(shares, train_step, has_rewards=has_rewards),
        ]
        records = [
            self._worker.records.build(
                "control.train-steps", step, key=str(train_step), headers=step_headers
            ),
            *(self._outcome_record(end) for end in ended),
            self._version_record(train_step + 1, artifact, headers=version_headers),
        ]
        self._writer.commit(
            records,
            offsets=layout.consumed,
            reader=self._reader,
            already_real=lambda: self._is_committed(step),
            before_commit=lambda: failpoint("trainer.in_transaction"),
        )
        self._num_steps += 1
        self._count_outcomes(ended)
        return step

    def commit_outcomes(self, ended: Sequence[PromptGroupEnded], *, train_step: int) -> None:
        """Commit ends that should not wait for the train step at work, so that the prompter can
        fill their seats.

        Their offsets follow with the step: until then a restart reads them again, and knows them as
            decided.
        """
        wanted = {group.prompt_group_id for group in ended}
        self._writer.commit(
            [self._outcome_record(group) for group in ended],
            already_real=lambda: self._are_committed(wanted, train_step),
        )
        self._count_outcomes(ended)

    def _count_outcomes(self, ended: Sequence[PromptGroupEnded]) -> None:
        self._ended.update(end.outcome.value for end in ended if not is_guest(end.prompt_group_id))

    def _history(self) -> TrainingHistory:
        """Read what was committed since the transaction before the last publication of ours, or
        since we began.
        """
        return TrainingHistory.read_from(self._worker, self._control_offsets)

    def _is_committed(self, step: TrainStepCommitted) -> bool:
        """Tell whether an unsure commit of ours became real.

        Raises:
            Fenced: Another trainer committed this step while we were not sure; what we trained is
                on nobody's path.
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
        """Tell the same of ends, which become real all or none; raises as `_is_committed`."""
        history = self._history()
        if any(step.train_step >= train_step for step in history.steps):
            raise Fenced(f"train step {train_step} was committed by another trainer; end this one")
        known = group_ids & history.ended_group_ids
        if known and known != group_ids:
            raise Fenced(
                f"the end of prompt group {min(known)} was committed by another trainer; end "
                "this one"
            )
        return bool(known)

    def _outcome_record(self, ended: PromptGroupEnded) -> ProducerRecord:
        self._worker.metrics.ended(ended.outcome)
        return self._worker.records.build(
            "control.prompt-group-outcomes", ended, key=ended.prompt_group_id
        )

    def _version_record(
        self, version: int, artifact: ObjectRef, *, headers: Mapping[str, str] = NO_HEADERS
    ) -> ProducerRecord:
        self._control_offsets = self._control_end_offsets()
        event = PolicyVersionPublished(
            policy_version=version,
            artifact=artifact,
            transports=self._transports,
            start_offsets=self._start_offsets(version),
            control_offsets=[
                TopicOffset(self._worker.plan.topic(entity), 0, offset)
                for entity, offset in self._control_offsets.items()
            ],
            num_steps_before=self._num_steps,
            outcome_counts_before=dict(self._ended),
        )
        return self._worker.records.build(
            "control.policy-versions", event, key=str(version), headers=headers
        )

    def _start_offsets(self, version: int) -> list[TopicOffset]:
        """Ask where the version's slot ends now: its own records can only come after its
        publication.
        """
        plan = self._worker.plan
        places = [
            (topic, partition)
            for topic in plan.sample_topics()
            for partition in plan.partitions_of_version(version)
        ]
        return [
            TopicOffset(topic, partition, offset)
            for (topic, partition), offset in sorted(self._admin.end_offsets(places).items())
        ]

    def _control_end_offsets(self) -> dict[str, int]:
        """Ask where the topics end that we alone write."""
        places = {(self._worker.plan.topic(entity), 0): entity for entity in SUMMED_ENTITIES}
        return {places[place]: offset for place, offset in self._admin.end_offsets(places).items()}

    def close(self) -> None:
        """Leave nothing open."""
        self._writer.close()


def build_trained_outcomes(
    shares: Sequence[RankStepResult], train_step: int, *, has_rewards: bool = True
) -> list[PromptGroupEnded]:
    """Return the ends of the prompt groups that a step trained, with their mean rewards where there
    are any.
    """
    rewards: dict[str, list[float]] = {}
    versions: dict[str, int] = {}
    for share in shares:
        for sample_id, reward, staleness in zip(
            share.sample_ids, share.rewards, share.staleness, strict=True
        ):
            group_id = sample_id.rpartition("/")[0]
            rewards.setdefault(group_id, []).append(reward)
            versions[group_id] = min(train_step - staleness, versions.get(group_id, train_step))
    ended = []
    for share in shares:
        for group_id in share.prompt_group_ids:
            mean_reward = sum(rewards[group_id]) / len(rewards[group_id]) if has_rewards else None
            ended.append(
                end_of(
                    group_id,
                    Outcome.TRAINED,
                    policy_version=versions[group_id],
                    trainer_version=train_step,
                    mean_reward=mean_reward,
                )
            )
    return ended
