"""Scores the samples of a run by another reward function, and keeps the scores in a topic of their
own.

Each score is in the partition of its sample, as on `reward.scores`, so that consumers can join
both locally. Scored samples are not scored again: a second call continues where the first stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from relax_events.errors import ConfigError, RewardError
from relax_events.events.codec import EventCodec
from relax_events.events.generations import TrajectoryKey, get_trajectory_key
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.history.run_log import OffsetRange, RunLog, TopicPartition
from relax_events.history.samples.filter import Bounds, integer_range
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.scores import Score
from relax_events.rewards.scoring import build_reward_item, build_sample_scored
from relax_events.rewards.trial import (
    BATCH_ITEMS,
    Completion,
    FunctionScorer,
    Result,
    ScoredCompletion,
    describe_result,
)
from relax_events.session.broker_address import open_admin
from relax_events.topics.names import REWARD_SCORES, ROLLOUT_SAMPLES, SCHEMAS

Results = dict[TrajectoryKey, Result]


def read_completions(
    log: RunLog, versions: Bounds, scorers: Iterable[FunctionScorer]
) -> Iterator[list[Completion]]:
    """Yield the samples of these versions, each once in each generation, in lists of bounded length
    of one partition.

    Args:
        log: The run's log.
        versions: Policy versions.
        scorers: If a scorer scores prompt groups, their samples stay together, and samples of
            incomplete groups come last.
    """
    by_group = any(scorer.takes_prompt_group for scorer in scorers)
    for topic_partition, span in log.offset_ranges(
        ROLLOUT_SAMPLES, select_versions(log, versions)
    ).items():
        seen: set[TrajectoryKey] = set()
        batch: list[Completion] = []
        open_groups: dict[str, list[Completion]] = {}
        for record in log.read({topic_partition: span}, SampleRolledOut):
            if (key := get_trajectory_key(record.event)) in seen:
                continue
            seen.add(key)
            completion = Completion(build_reward_item(record.event), record.event)
            name = completion.item.prompt_group_id
            group = open_groups.setdefault(name, [])
            group.append(completion)
            if not by_group or len(group) == completion.group_size:
                batch += open_groups.pop(name)
            if len(batch) >= BATCH_ITEMS:
                yield batch
                batch = []
        batch += [completion for group in open_groups.values() for completion in group]
        if batch:
            yield batch


def select_versions(log: RunLog, versions: Bounds) -> range:
    """Return the part of the given versions that a run has."""
    return integer_range(max(versions[0], 0), min(versions[1], log.newest_version))


class RecordedScores:
    """The scores that a run's own reward function gave. Holds the scores of one partition."""

    name = "recorded"

    def __init__(self, log: RunLog, versions: Bounds) -> None:
        self._log = log
        spans = log.offset_ranges(REWARD_SCORES, select_versions(log, versions))
        self._spans = {
            topic_partition[1]: {topic_partition: span} for topic_partition, span in spans.items()
        }
        self._partition, self._results = -1, Results()

    def score(self, batch: Sequence[Completion]) -> list[Result]:
        """Return the recorded score of each sample of one partition."""
        samples = [get_sample(completion) for completion in batch]
        partition = find_partition(self._log, samples[0])
        if partition != self._partition:
            self._partition = partition
            self._results = read_results(self._log, self._spans.get(partition, {}))
        missing = RewardError("the log has no score of this sample")
        return [self._results.get(get_trajectory_key(sample), missing) for sample in samples]

    def describe(self, item: RewardItem, result: Result) -> ScoredCompletion:
        """Return a result; the log has no explanations."""
        return describe_result(item, result)


class KeptScores:
    """Scores samples by a function and writes the scores to a topic; samples with a score in the
    topic are not scored again. Holds the scores of one partition.
    """

    def __init__(
        self,
        log: RunLog,
        function: FunctionScorer,
        *,
        entity: str,
        producer: RecordProducer,
        codec: EventCodec,
    ) -> None:
        """Score the samples of a run.

        Args:
            log: The run's log.
            function: The function.
            entity: The topic of the scores, without the run's prefix.
            producer: Writes the scores.
            codec: Encodes them.
        """
        self._log, self._function, self._entity = log, function, entity
        self._producer, self._codec = producer, codec
        self.name, self.describe = function.name, function.describe
        self._partition, self._results = -1, Results()
        self.num_scored = self.num_failed = self.num_scored_before = 0

    def score(self, batch: Sequence[Completion]) -> list[Result]:
        """Return the score of each sample of one partition; new scores are acknowledged by then.

        Raises:
            ConfigError: The topic holds scores of another function.
        """
        partition = find_partition(self._log, get_sample(batch[0]))
        if partition != self._partition:
            self._partition = partition
            spans = self._log.full_ranges(self._entity, [partition])
            self._results = read_results(self._log, spans, check=self._require_same_function)
            self.num_scored_before += len(self._results)
        self._score_new(self._select_unscored(batch))
        return [self._results[get_trajectory_key(get_sample(one))] for one in batch]

    def _select_unscored(self, batch: Sequence[Completion]) -> list[Completion]:
        """Return the completions to score: all without a score, and the others of their prompt
        groups where the function needs them.
        """
        unscored = [
            one for one in batch if get_trajectory_key(get_sample(one)) not in self._results
        ]
        if not self._function.takes_prompt_group:
            return unscored
        groups = {one.item.prompt_group_id for one in unscored}
        return [one for one in batch if one.item.prompt_group_id in groups]

    def _score_new(self, batch: Sequence[Completion]) -> None:
        """Score samples, write the new scores, and record them once they are acknowledged."""
        completions = [self._function.fetch(completion) for completion in batch]
        results = self._function.score_fetched(completions)
        events = [
            build_sample_scored(
                sample, result, reward_name=self._function.name, reward_digest=self._function.digest
            )
            for sample, result in zip(map(get_sample, completions), results, strict=True)
            if get_trajectory_key(sample) not in self._results
        ]
        self._producer.write(self._build_record(event) for event in events)
        self._results.update((get_trajectory_key(event), to_result(event)) for event in events)
        self.num_scored += len(events)
        self.num_failed += sum(event.reward is None for event in events)

    def _build_record(self, event: SampleScored) -> ProducerRecord:
        return ProducerRecord(
            self._log.plan.topic(self._entity),
            self._codec.encode(event),
            key=event.prompt_group_id,
            partition=self._partition,
            headers={POLICY_VERSION_HEADER: str(event.policy_version)},
        )

    def _require_same_function(self, event: SampleScored) -> None:
        name, digest = self._function.name, self._function.digest
        if (event.reward_name.rpartition(":")[2], event.reward_digest) != (
            name.rpartition(":")[2],
            digest,
        ):
            topic = self._log.plan.topic(self._entity)
            raise ConfigError(
                f"{topic} holds scores of {event.reward_name}, version {event.reward_digest[:12]}, "
                f"this is {name}, version {digest[:12]}; take another --name"
            )


@contextmanager
def open_kept_scores(log: RunLog, function: FunctionScorer, name: str) -> Iterator[KeptScores]:
    """Create the topic of a function's scores unless it exists.

    Raises:
        ConfigError: The name is invalid, or the topic has other partitions than the samples.
    """
    entity = log.plan.scores_entity(name)
    with closing(RecordProducer(log.connection)) as producer:
        create_topic(log, name)
        codec = open_codec(log.config.broker)
        for schema in log.codec.published_form().values():
            codec.learn(schema)
        codec.frame()
        producer.write(
            ProducerRecord(log.plan.topic(SCHEMAS), schema, key=fingerprint.hex())
            for fingerprint, schema in codec.published_form().items()
        )
        yield KeptScores(log, function, entity=entity, producer=producer, codec=codec)


def create_topic(log: RunLog, name: str) -> None:
    """Create the topic of the scores unless it exists.

    Raises:
        ConfigError: The topic has other partitions than the samples.
    """
    spec = log.plan.scores_spec(name)
    with closing(open_admin(log.config, name="rescore")) as admin:
        topic = admin.topics(spec.name).get(spec.name)
        if topic is None:
            admin.create([spec])
        elif topic.num_partitions != spec.num_partitions:
            raise ConfigError(
                f"topic {spec.name} has {topic.num_partitions} partitions, the samples have "
                f"{spec.num_partitions}; take another --name"
            )


def read_results(
    log: RunLog,
    spans: dict[TopicPartition, OffsetRange],
    *,
    check: Callable[[SampleScored], None] = lambda _: None,
) -> Results:
    """Return the first score of each sample in these ranges; `check` may refuse a score."""
    results = Results()
    for record in log.read(spans, SampleScored):
        check(record.event)
        results.setdefault(get_trajectory_key(record.event), to_result(record.event))
    return results


def to_result(event: SampleScored) -> Result:
    """Return a score event as the result that it was built from, without its parts."""
    if event.reward is None:
        return RewardError(event.error or "no reward")
    return Score(event.reward, {})


def find_partition(log: RunLog, sample: SampleRolledOut) -> int:
    """Return the partition of a sample, which its scores share."""
    return log.plan.partition(sample.prompt_group_id, sample.policy_version)


def get_sample(completion: Completion) -> SampleRolledOut:
    """Return the sample of a completion from a log."""
    assert completion.sample is not None, "completions of a log have samples"
    return completion.sample
