"""The advantage role: joins each prompt group's samples with their scores and log-probabilities,
and computes advantages.

Consumes rollout.samples, reward.scores and, as the algorithm needs, reference.logprobs,
actor.logprobs, critic.values and teacher.logprobs; waits for the last record of a prompt group;
produces SamplesReady, or one PromptGroupEnded, on advantage.samples. The input
offsets follow the oldest prompt group that is still open.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from relax_events.algorithms.advantage_estimator import (
    AdvantageEstimator,
    RewardedSample,
    require_bounded_rewards,
)
from relax_events.config import AlgorithmConfig, RunConfig
from relax_events.deadline import Deadline
from relax_events.errors import CorruptRecord, ForeignRecord, PoisonSample, RewardError
from relax_events.events.parts import Array, FinishReason, Outcome, SampleOutcome, TopicOffset
from relax_events.events.tensors import dense
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.records import Record
from relax_events.objects.store import list_media
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.join import JoinedGroup, PromptGroupJoin
from relax_events.runtime.validation import check_samples, require_allowed_event
from relax_events.runtime.worker import Worker
from relax_events.staleness import IssuedGroup, is_external
from relax_events.topics.names import (
    EVALUATION_FIELDS,
    LOGPROB_TOPICS,
    REWARD_SCORES,
    ROLLOUT_SAMPLES,
    TRAINING_SAMPLES,
)

log = structlog.get_logger()
IDLE_SECONDS = 0.5
DRAIN_COMMIT_SECONDS = 5.0
MAX_ERROR_CHARACTERS = 600
MAX_RECORDS = 256
"""Maximum records that are joined between two polls; their offsets are committed after them."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker("advantage", config, index=index) as worker:
        AdvantageLoop(worker).run()


def needed_model_roles(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Return the roles whose log-probabilities or values a sample needs for training."""
    needs_by_role = {
        "reference": algorithm.needs_reference,
        "actor": algorithm.old_logprobs == "actor",
        "critic": algorithm.needs_critic,
        "teacher": algorithm.distills,
    }
    return frozenset(name for name, needed in needs_by_role.items() if needed)


class AdvantageLoop:
    """See the module's docstring."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        logprob_roles = needed_model_roles(worker.config.algorithm)
        self._has_rewards = worker.config.algorithm.has_rewards
        scores = [REWARD_SCORES] if self._has_rewards else []
        entities = [
            ROLLOUT_SAMPLES,
            *scores,
            *(LOGPROB_TOPICS[name] for name in sorted(logprob_roles)),
        ]
        self._join = PromptGroupJoin(logprob_roles=logprob_roles, needs_scores=self._has_rewards)
        self._estimator = AdvantageEstimator(
            worker.config.algorithm, max_new_tokens=worker.config.engine.sampling.max_new_tokens
        )
        self._committed: dict[tuple[str, int], int] = {}
        self._expiry_is_due = False
        self._consumer = SubscribedConsumer(
            worker.connection,
            consumer_group=worker.plan.consumer_group("advantage"),
            topics=[worker.plan.topic(entity) for entity in entities],
            on_revoked=self._release,
        )
        worker.lifecycle.track_lag(self._consumer)

    def run(self) -> None:
        """Work until the drain starts."""
        worker = self._worker
        worker.control.follow(self._apply)
        while not worker.drain.requested:
            records = self._consumer.fetch(MAX_RECORDS, timeout_seconds=IDLE_SECONDS)
            if records:
                self._process(records)
            if self._expiry_is_due:
                self._expiry_is_due = False
                self._expire()
            worker.heartbeat.set_in_flight(self._join.num_open)
            worker.lifecycle.tick(working=bool(records))
        self._commit(wait=Deadline(DRAIN_COMMIT_SECONDS))
        self._consumer.close()

    def _process(self, records: list[Record]) -> None:
        started = time.monotonic()
        for record in records:
            is_late = self._worker.control.is_expired(record.policy_version)
            # the trainer may wait for this prompt group: then no new version expires it
            self._expiry_is_due |= is_late
            if is_late and record.topic != self._worker.plan.topic(ROLLOUT_SAMPLES):
                self._join.skip(record)
            elif (group := self._take(record)) is not None:
                self._worker.records.traces.record_wait(group.prompt_group_id, ROLLOUT_SAMPLES)
                with self._worker.records.traces.trace_groups(
                    "advantage", [group.prompt_group_id], topic=ROLLOUT_SAMPLES
                ):
                    self._finish(group)
            self._worker.lifecycle.record_progress()
        self._count_dropped()
        failpoint("advantage.before_flush")
        self._worker.records.producer.flush()
        failpoint("advantage.before_commit")
        self._commit()
        self._worker.lifecycle.record_processed(len(records), started)

    def _count_dropped(self) -> None:
        """Count the records of generations that were not joined, since the last call."""
        self._worker.metrics.count_dropped_generation(self._join.num_dropped)
        self._join.num_dropped = 0

    def _take(self, record: Record) -> JoinedGroup | None:
        """Join a record's samples; return their prompt group if that is complete or failed now."""
        events = self._worker.records.decode_samples(record)
        reason = "record could not be decoded"
        try:
            if events:
                return self._join.add(record, self._checked(record, events))
        except ForeignRecord as error:
            self._worker.records.dead_letter(record, error)
            self._join.skip(record)
            return None
        except PoisonSample as error:
            self._worker.records.dead_letter(record, error)
            reason = str(error)
        try:
            IssuedGroup.parse(record.key)
        except CorruptRecord:
            self._join.skip(record)  # of an unknown producer: a dead letter is enough
            return None
        return self._join.fail(record, reason)

    def _checked(
        self, record: Record, events: Sequence[Event]
    ) -> Sequence[SampleRolledOut | SampleScored | SampleEvaluated]:
        """Check that the events may be joined.

        Raises:
            ForeignRecord: They are on the wrong topic.
            PoisonSample: One is no sample, or an invalid one.
        """
        entity = self._worker.plan.parse_entity(record.topic)
        for event in events:
            require_allowed_event(entity, event)
        results = [event for event in events if isinstance(event, SampleScored | SampleEvaluated)]
        if len(results) == len(events):
            return results
        samples = check_samples(events)
        self._worker.control.wait_until_published(samples[0].policy_version)
        return samples

    def _finish(self, group: JoinedGroup) -> None:
        """Send a complete or failed prompt group to the trainer."""
        self._join.close(group)
        if reason := self._find_failure(group):
            self._end(group, Outcome.FAILED, reason)
            return
        rewarded = self._collect_rewards(group)
        mean_reward = float(np.mean([*rewarded.values()])) if self._has_rewards else None
        if reason := self._find_filter(group, rewarded):
            self._end(group, Outcome.FILTERED, reason, mean_reward=mean_reward)
            return
        try:
            advantages = self._advantages(group)
        except RewardError as error:
            self._end(group, Outcome.FAILED, f"reward: {error}")
            return
        ready = [
            self._build_ready(group, sample, advantages=values)
            for sample, values in zip(group.ordered_samples(), advantages, strict=True)
        ]
        for record in self._worker.records.build_for_samples(TRAINING_SAMPLES, ready):
            self._worker.records.producer.send(record)

    def _find_failure(self, group: JoinedGroup) -> str:
        """Return why a prompt group can't be trained, empty if it can: a record is unusable, too
        few samples have a reward, or all that have one were late, as in an outage of a sandbox.
        """
        if group.failure:
            return f"poison: {group.failure}"
        samples, rewarded = group.ordered_samples(), self._collect_rewards(group)
        num_needed = self._worker.config.algorithm.count_needed_samples(len(samples))
        if len(rewarded) < num_needed:
            outcomes = Counter(
                SampleOutcome.of(sample.finish_reason, rewarded.get(sample.sample_id))
                for sample in samples
            )
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            return (
                f"reward: {len(rewarded)} of {len(samples)} samples are usable, {num_needed} are "
                f"needed (algorithm.min_samples_per_group): {counts}; first: "
                f"{self._find_first_error(group):.{MAX_ERROR_CHARACTERS}}"
            )
        if all(
            sample.finish_reason is FinishReason.LATE
            for sample in samples
            if sample.sample_id in rewarded
        ):
            return (
                "reward: no sample of the prompt group finished by itself, all were late: the "
                "sandbox is overloaded, or the policy hangs its programs"
            )
        return ""

    def _find_first_error(self, group: JoinedGroup) -> str:
        errors = (
            sample.error or _find_refusal(group.scores[sample.sample_id]) or ""
            for sample in group.ordered_samples()
            if self._get_reward(group, sample) is None
        )
        return next(filter(None, errors), "reward.on_timeout gives late samples none")

    def _find_filter(self, group: JoinedGroup, rewarded: Mapping[str, float]) -> str:
        """Return why a prompt group with these rewards is left out, empty if it is not."""
        if is_external(group.prompt_group_id):
            return "external: generated and scored, not trained"
        algorithm = self._worker.config.algorithm
        whole = [
            rewarded[sample.sample_id]
            for sample in group.samples.values()
            if sample.sample_id in rewarded and sample.finish_reason is not FinishReason.LENGTH
        ]
        if algorithm.truncated_samples != "train" and not whole:
            return "all samples were cut off by their length"
        counted = whole if algorithm.truncated_samples == "drop" else [*rewarded.values()]
        if algorithm.filter_uniform_rewards and np.ptp(counted) == 0:
            return "all rewards are equal"
        return ""

    def _collect_rewards(self, group: JoinedGroup) -> dict[str, float]:
        """Return the rewards of the samples that have one."""
        rewards = {
            sample.sample_id: self._get_reward(group, sample) for sample in group.samples.values()
        }
        return {name: reward for name, reward in rewards.items() if reward is not None}

    def _get_score(self, group: JoinedGroup, sample: SampleRolledOut) -> SampleScored | None:
        """Return a sample's score; None where it has no usable one."""
        score = group.scores.get(sample.sample_id)
        return None if score is None or _find_refusal(score) is not None else score

    def _get_reward(self, group: JoinedGroup, sample: SampleRolledOut) -> float | None:
        """Return a sample's reward, if it has one; 0 in a run without rewards."""
        if not self._has_rewards:
            return 0.0
        score = self._get_score(group, sample)
        return None if score is None else score.reward

    def _get_components(self, group: JoinedGroup, sample: SampleRolledOut) -> dict[str, float]:
        score = self._get_score(group, sample)
        return {} if score is None else score.components

    def _get_turn_rewards(self, group: JoinedGroup, sample: SampleRolledOut) -> Array | None:
        score = self._get_score(group, sample)
        return None if score is None else score.turn_rewards

    def _get_token_rewards(self, group: JoinedGroup, sample: SampleRolledOut) -> Array | None:
        score = self._get_score(group, sample)
        return None if score is None else score.token_rewards

    def _advantages(self, group: JoinedGroup) -> list[NDArray[np.float32]]:
        return self._estimator(
            [self._rewarded(group, sample) for sample in group.ordered_samples()]
        )

    def _rewarded(self, group: JoinedGroup, sample: SampleRolledOut) -> RewardedSample:
        evaluated = {
            name: dense(values, what=f"sample {sample.sample_id}: {name}")
            for name, values in _collect_evaluations(group, sample).items()
        }
        policy_logprobs = evaluated.pop("actor_logprobs", None)
        if self._worker.config.algorithm.old_logprobs != "actor":
            policy_logprobs = _dense(sample.rollout_logprobs, sample)
        return RewardedSample(
            sample_id=sample.sample_id,
            reward=self._get_reward(group, sample),
            components=self._get_components(group, sample),
            loss_mask=dense(sample.loss_mask, what=f"sample {sample.sample_id}: loss_mask"),
            tokens=_dense(sample.tokens, sample),
            path_lengths=sample.path_lengths,
            truncated_paths=sample.truncated_paths,
            policy_logprobs=policy_logprobs,
            is_truncated=sample.finish_reason is FinishReason.LENGTH,
            is_late=sample.finish_reason is FinishReason.LATE,
            turn_rewards=_dense(self._get_turn_rewards(group, sample), sample),
            token_rewards=_dense(self._get_token_rewards(group, sample), sample),
            **evaluated,
        )

    def _build_ready(
        self, group: JoinedGroup, sample: SampleRolledOut, *, advantages: NDArray[np.float32]
    ) -> SampleReady:
        evaluated = _collect_evaluations(group, sample)
        taught = group.logprobs.get("teacher", {}).get(sample.sample_id)
        return SampleReady(
            key=sample.key,
            tokens=sample.tokens,
            loss_mask=dense(sample.loss_mask, what=f"sample {sample.sample_id}: loss_mask"),
            rollout_logprobs=sample.rollout_logprobs,
            actor_logprobs=evaluated.get("actor_logprobs"),
            ref_logprobs=evaluated.get("ref_logprobs"),
            values=evaluated.get("values"),
            teacher_logprobs=evaluated.get("teacher_logprobs"),
            topk_ids=sample.topk_ids
            if taught is None or taught.topk_ids is None
            else taught.topk_ids,
            topk_teacher_logprobs=None if taught is None else taught.topk_logprobs,
            advantages=advantages,
            reward=self._get_reward(group, sample),
            components=self._get_components(group, sample),
            turn_rewards=self._get_turn_rewards(group, sample),
            token_rewards=self._get_token_rewards(group, sample),
            temperature=sample.temperature,
            num_prompt_tokens=sample.num_prompt_tokens,
            finish_reason=sample.finish_reason,
            media=[] if sample.path_lengths else list_media(sample),
            num_prompt_media=0 if sample.path_lengths else len(sample.prompt_media),
            path_media=sample.path_media,
            routed_experts=sample.routed_experts,
            path_lengths=sample.path_lengths,
            truncated_paths=sample.truncated_paths,
            # no version generated the data's own answers
            version_segments=sample.version_segments if self._has_rewards else [],
        )

    def _end(
        self, group: JoinedGroup, outcome: Outcome, reason: str, *, mean_reward: float | None = None
    ) -> None:
        self._worker.records.producer.send(
            self._worker.records.build_end_request(
                group.prompt_group_id,
                outcome,
                reason,
                policy_version=group.policy_version,
                mean_reward=mean_reward,
            )
        )
        log.info(
            "prompt_group.ended",
            prompt_group_id=group.prompt_group_id,
            outcome=outcome,
            reason=reason,
        )

    def _apply(self, event: Event) -> None:
        if isinstance(event, PolicyVersionPublished):
            self._expiry_is_due = True

    def _expire(self) -> None:
        """End prompt groups that left the window. An incomplete generation is dropped without a
        record: its lease brings the prompt group back.
        """
        oldest = self._worker.control.policy_version - self._worker.config.run.max_staleness
        for group in self._join.evict_older_than(oldest):
            self._join.close(group)
            if group.has_all_samples:
                self._end(
                    group,
                    Outcome.EXPIRED,
                    (
                        f"version {group.policy_version} left the window before its samples were "
                        "scored"
                    ),
                )
        self._worker.records.producer.flush()
        self._commit()

    def _commit(self, *, wait: Deadline | None = None) -> None:
        moved = [
            mark
            for mark in self._join.pending_offsets()
            if self._committed.get((mark.topic, mark.partition)) != mark.offset
        ]
        self._committed |= {(mark.topic, mark.partition): mark.offset for mark in moved}
        self._consumer.commit(moved, wait=wait)

    def _release(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        self._commit(wait=deadline)
        failpoint("advantage.handing_over")
        for offset in offsets:
            self._join.drop_partition(offset.topic, offset.partition)
            self._committed.pop((offset.topic, offset.partition), None)


def _find_refusal(score: SampleScored) -> str | None:
    """Return why a score gives no reward; None if it does."""
    if score.error is not None or score.reward is None:
        return score.error or ""
    try:
        require_bounded_rewards(score.sample_id, score.reward, score.components)
    except RewardError as error:
        return str(error)
    return None


def _collect_evaluations(group: JoinedGroup, sample: SampleRolledOut) -> dict[str, Array]:
    """Return what models computed for a sample, by the field of a ready sample that holds it."""
    return {
        EVALUATION_FIELDS[role]: evaluation.values
        for role, results in group.logprobs.items()
        if (evaluation := results.get(sample.sample_id)) is not None
    }


def _dense(values: Array | None, sample: SampleRolledOut) -> NDArray[np.generic] | None:
    return (
        None
        if values is None
        else dense(values, what=f"sample {sample.sample_id}: log-probabilities of a model")
    )
