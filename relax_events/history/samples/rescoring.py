"""Rescores the samples of a run by another reward function, into a topic of its own, and compares
both.

Each score is in the partition of its sample, as on `reward.scores`, so that consumers can join
both locally. Scored samples are not scored again: a second call continues where the first stopped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from relax_events.config import RewardConfig
from relax_events.errors import ConfigError
from relax_events.events.codec import EventCodec
from relax_events.events.generations import TrajectoryKey, trajectory_of
from relax_events.events.types import UNREAD_BY_REWARDS, SampleRolledOut, SampleScored
from relax_events.history.run_log import OffsetRange, RunLog, TopicPartition
from relax_events.history.samples.filter import Bounds, integer_range
from relax_events.history.samples.score_comparison import Comparison, ScoreComparison, ScoredPair
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.objects import ObjectStore, check_out
from relax_events.rewards.pool import RewardPool
from relax_events.rewards.scoring import build_reward_item, build_sample_scored
from relax_events.session.broker_address import open_admin

SAMPLES_AT_ONCE = 256
GroupKey = tuple[str, int, str]
Rewards = dict[TrajectoryKey, float | None]
"""By trajectory; None where scoring failed."""


@dataclass(slots=True)
class RescoringProgress:
    """The progress of a rescoring: scored samples, failed ones, earlier scores, and partitions of
    the log.
    """

    num_scored: int = 0
    num_failed: int = 0
    num_scored_before: int = 0
    num_partitions_done: int = 0
    num_partitions: int = 0


Report = Callable[[RescoringProgress], None]


def default_scores_name(function: str) -> str:
    """Return the default name of a reward function's scores: `gsm8k`, or `math-strict` for
    `rewards/math.py:strict`.
    """
    path, _, name = function.rpartition(":")
    stem = path.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    text = f"{stem}-{name}" if stem else name
    return re.sub("[^a-z0-9_-]", "-", text.lower()).strip("-_")[:48]


def rescore(
    log: RunLog,
    reward: RewardConfig,
    *,
    name: str,
    versions: Bounds,
    threshold: float,
    report: Report,
) -> Comparison:
    """Score the samples of some or all versions, and compare with the run's scores.

    Args:
        log: The run's log.
        reward: The other reward function, with its limits.
        name: Of the scores: they are written to the topic `reward.scores.<name>`.
        versions: Policy versions whose samples are scored.
        threshold: Rewards of at least this count as good, for the agreement.
        report: Called after every record batch.
    Returns:
        The comparison over all these samples, including those that were scored before.
    Raises:
        ConfigError: The name is invalid, the function can't be loaded, or the topic holds scores of
            another function.
    """
    log.plan.scores_entity(name)
    extent = integer_range(max(versions[0], 0), min(versions[1], log.newest_version))
    spans = log.offset_ranges("rollout.samples", extent)
    originals_at = {
        topic_partition[1]: {topic_partition: span}
        for topic_partition, span in log.offset_ranges("reward.scores", extent).items()
    }
    comparison, progress = (
        ScoreComparison(threshold=threshold),
        RescoringProgress(num_partitions=len(spans)),
    )
    with RewardPool(reward) as pool, closing(RecordProducer(log.connection)) as producer:
        entity, codec = open_topic(log, name), open_codec(log.config.broker)
        published = codec.published_form()
        producer.write(
            ProducerRecord(log.plan.topic("control.schemas"), schema, key=mark.hex())
            for mark, schema in published.items()
        )
        for topic_partition, span in spans.items():
            originals = read_rewards(log, originals_at.get(topic_partition[1], {}))
            PartitionRescorer(log, entity, pool, producer, codec, comparison, progress, report).run(
                topic_partition, span, originals
            )
            progress.num_partitions_done += 1
            report(progress)
    return comparison.result()


def open_topic(log: RunLog, name: str) -> str:
    """Create the topic of the scores unless it exists; return its entity.

    Raises:
        ConfigError: The topic has other partitions than the samples.
    """
    spec = log.plan.scores_spec(name)
    admin = open_admin(log.config, name="rescore")
    found = admin.topics(spec.name).get(spec.name)
    if found is None:
        admin.create([spec])
    elif found.num_partitions != spec.num_partitions:
        raise ConfigError(
            f"topic {spec.name} has {found.num_partitions} partitions, the samples have "
            f"{spec.num_partitions}; take another --name"
        )
    admin.close()
    return log.plan.scores_entity(name)


@dataclass(slots=True)
class PartitionRescorer:
    """Scores one partition after the other. Holds that partition's scores and ids, and a batch of
    samples.
    """

    log: RunLog
    entity: str
    pool: RewardPool
    producer: RecordProducer
    codec: EventCodec
    comparison: ScoreComparison
    progress: RescoringProgress
    report: Report
    open_groups: dict[GroupKey, list[ScoredPair]] = field(default_factory=dict)

    def run(self, topic_partition: TopicPartition, span: OffsetRange, originals: Rewards) -> None:
        """Score a partition's samples and add them to the comparison, prompt group by prompt
        group.
        """
        _, partition = topic_partition
        new = read_rewards(
            self.log,
            self.log.full_ranges(self.entity, [partition]),
            check=self._require_same_function,
        )
        self.progress.num_scored_before += len(new)
        for samples in self._batches(topic_partition, span):
            self._score(self._unscored(samples, new), partition, new)
            for sample in samples:
                self._pair(sample, originals.get(trajectory_of(sample)), new[trajectory_of(sample)])
            self.report(self.progress)
        for pairs in self.open_groups.values():
            self.comparison.add_group(pairs)
        self.open_groups.clear()

    def _batches(
        self, topic_partition: TopicPartition, span: OffsetRange
    ) -> Iterator[list[SampleRolledOut]]:
        """Yield each sample once, in lists of bounded length; together with its prompt group where
        the function requires it.
        """
        seen: set[TrajectoryKey] = set()
        batch: list[SampleRolledOut] = []
        gathered: dict[GroupKey, list[SampleRolledOut]] = {}
        for found in self.log.read({topic_partition: span}, SampleRolledOut):
            if trajectory_of(found.event) in seen:
                continue
            seen.add(trajectory_of(found.event))
            batch += (
                self._gather(found.event, gathered)
                if self.pool.takes_prompt_group
                else [found.event]
            )
            if len(batch) >= SAMPLES_AT_ONCE:
                yield batch
                batch = []
        batch += [
            sample for samples in gathered.values() for sample in samples
        ]  # of incomplete generations
        if batch:
            yield batch

    def _gather(
        self, sample: SampleRolledOut, gathered: dict[GroupKey, list[SampleRolledOut]]
    ) -> list[SampleRolledOut]:
        """Return the sample's complete prompt group when it is the last of it, else nothing."""
        samples = gathered.setdefault(group_key(sample), [])
        samples.append(sample)
        return (
            gathered.pop(group_key(sample)) if len(samples) == sample.key.samples_per_prompt else []
        )

    def _unscored(self, samples: list[SampleRolledOut], new: Rewards) -> list[SampleRolledOut]:
        """Return the samples to score: all without a score, and the others of their prompt groups
        where the function needs them.
        """
        open_groups = {group_key(sample) for sample in samples if trajectory_of(sample) not in new}
        return [
            sample
            for sample in samples
            if trajectory_of(sample) not in new
            or (self.pool.takes_prompt_group and group_key(sample) in open_groups)
        ]

    def _score(self, samples: list[SampleRolledOut], partition: int, new: Rewards) -> None:
        """Score samples, write the new scores, and record them once they are acknowledged."""
        if self.pool.optional_arguments and samples:
            store = ObjectStore.open(
                self.log.config.objects_uri, uri_aliases=self.log.config.objects.uri_aliases
            )
            samples = [check_out(sample, store, leave=UNREAD_BY_REWARDS) for sample in samples]
        results = self.pool.score_batch([build_reward_item(sample) for sample in samples])
        scored = [
            build_sample_scored(
                sample, result, reward_name=self.pool.name, reward_digest=self.pool.digest
            )
            for sample, result in zip(samples, results, strict=True)
            if trajectory_of(sample) not in new
        ]
        self.producer.write(self._record(event, partition) for event in scored)
        new.update((trajectory_of(event), event.reward) for event in scored)
        self.progress.num_scored += len(scored)
        self.progress.num_failed += sum(event.reward is None for event in scored)

    def _record(self, event: SampleScored, partition: int) -> ProducerRecord:
        headers = {POLICY_VERSION_HEADER: str(event.policy_version)}
        topic = self.log.plan.topic(self.entity)
        return ProducerRecord(
            topic,
            self.codec.encode(event),
            key=event.prompt_group_id,
            partition=partition,
            headers=headers,
        )

    def _pair(self, sample: SampleRolledOut, original: float | None, new: float | None) -> None:
        key = group_key(sample)
        pairs = self.open_groups.setdefault(key, [])
        pairs.append(
            ScoredPair(sample.sample_id, sample.policy_version, original, new, sample.completion)
        )
        if len(pairs) == sample.key.samples_per_prompt:
            self.comparison.add_group(self.open_groups.pop(key))

    def _require_same_function(self, event: SampleScored) -> None:
        function = self.pool.name.rpartition(":")[2]
        if (event.reward_name.rpartition(":")[2], event.reward_digest) != (
            function,
            self.pool.digest,
        ):
            was = f"{event.reward_name}, version {event.reward_digest[:12]}"
            text = (
                f"{self.log.plan.topic(self.entity)} holds scores of {was}, this is "
                f"{self.pool.name}, version {self.pool.digest[:12]}"
            )
            raise ConfigError(f"{text}; take another --name")


def read_rewards(
    log: RunLog,
    spans: dict[TopicPartition, OffsetRange],
    *,
    check: Callable[[SampleScored], None] = lambda _: None,
) -> Rewards:
    """Return the first reward of each sample in these ranges; `check` may refuse a score."""
    rewards: Rewards = {}
    for found in log.read(spans, SampleScored):
        check(found.event)
        rewards.setdefault(trajectory_of(found.event), found.event.reward)
    return rewards


def group_key(event: SampleRolledOut) -> GroupKey:
    """Return the key that distinguishes generations of prompt groups."""
    return event.prompt_group_id, event.policy_version, event.key.generation_digest
