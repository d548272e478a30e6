"""The judge role: a model of the run grades every sample.

Consumes rollout.samples, produces SampleScored on reward.scores: for the samples whose reward
function is `genrm`, in place of the reward role. A worker generates many judgements concurrently on
its own engine, and writes each score as soon as it is ready. If a judgement holds no score, its
sample fails with the judgement's text, or gets 0 (`judge.on_parse_error`). A sample for which no
judge prompt can be built fails. With `judge.media` the judge is shown the media of prompt and
environment, before its question.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import count

import structlog

from relax_events.config import RunConfig
from relax_events.config.reward import JUDGED
from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest
from relax_events.errors import MediaError, PoisonSample, RewardError
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord
from relax_events.objects.store import list_media
from relax_events.rewards.run_judge import JudgeReward, load_judge_rewards
from relax_events.rewards.scores import Score
from relax_events.rewards.scoring import (
    build_reward_item,
    build_sample_scored,
    get_fixed_score,
    read_source,
)
from relax_events.roles.engine_monitor import EngineMonitor
from relax_events.roles.judging import JudgeQuestions, open_judge
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.concurrent_processor import ConcurrentLoop, Done, Key
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.topics.names import REWARD_SCORES

log = structlog.get_logger()


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker("judge", config, index=index) as worker:
        judged = load_judge_rewards(config)
        engine = open_judge(config, metrics=worker.metrics.routing)
        try:
            ConcurrentLoop(worker, JudgeScorer(worker, engine, judged)).run()
        finally:
            engine.close()


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A sample that is being judged, with its monotonic start time and its score parser."""

    key: Key
    sample: SampleRolledOut
    reward: JudgeReward
    since: float


class JudgeScorer:
    """Generates judgements with the engine and parses their scores; see
    `concurrent_processor.ConcurrentProcessor`.
    """

    def __init__(
        self, worker: Worker, engine: Engine, judged: dict[str | None, JudgeReward]
    ) -> None:
        """Start without any sample.

        Args:
            worker: Gives the run's configuration, metrics and log.
            engine: Holds the judge model; idle.
            judged: The judge reward of each data source; samples of other sources are skipped.
        """
        self._worker, self._engine, self._judged, self._judge = (
            worker,
            engine,
            judged,
            worker.config.judge,
        )
        self._monitor = EngineMonitor(worker, engine, config=worker.config.judge.engine)
        self._questions = JudgeQuestions(worker.config)
        self._numbers = count()
        self._asked: dict[str, PendingSample] = {}
        self._done: list[Done] = []

    @property
    def capacity(self) -> int:
        """Samples that can be submitted now."""
        return self._judge.engine.max_running_samples - len(self._asked)

    @property
    def progress(self) -> int:
        """Number of tokens generated so far."""
        return self._engine.num_tokens

    def submit(self, key: Key, sample: SampleRolledOut) -> None:
        """Submit the judge request of a sample."""
        reward = self._judged.get(read_source(sample, self._worker.config.reward))
        if reward is None:
            self._done.append((key, ()))
            return
        pending_sample = PendingSample(key, sample, reward, time.monotonic())
        if not sample.finish_reason.is_scored:
            score = get_fixed_score(sample.finish_reason, self._worker.config.reward)
            record = self._record(pending_sample, score, outcome="skipped")
            self._done.append((key, (record,)))
            return
        name = str(next(self._numbers))
        try:
            self._engine.submit(self._request(name, pending_sample))
        except (PoisonSample, RewardError, MediaError) as error:
            self._done.append(
                (
                    key,
                    (
                        self._record(
                            pending_sample, RewardError(f"the judge request can't be made: {error}")
                        ),
                    ),
                )
            )
        else:
            self._asked[name] = pending_sample

    def poll(self, *, timeout_seconds: float) -> list[Done]:
        """Return the judged samples, waiting for the first."""
        if self._asked:
            with self._monitor.activity("generating"):
                generated = self._engine.poll(
                    timeout_seconds=0.0 if self._done else timeout_seconds
                )
            for written in generated:
                if (asked := self._asked.pop(written.prompt_group_id, None)) is not None:
                    self._done.append((asked.key, (self._judgement(asked, written),)))
            failpoint("judge.at_work")
        done, self._done = self._done, []
        return done

    def cancel(self, keys: Collection[Key]) -> None:
        """Cancel judgements that are no longer needed."""
        dropped, cancelled_keys = (
            [name for name, asked in self._asked.items() if asked.key in keys],
            set(keys),
        )
        for name in dropped:
            del self._asked[name]
        self._done = [done for done in self._done if done[0] not in cancelled_keys]
        self._engine.abort(dropped)

    def _request(self, name: str, asked: PendingSample) -> GenerationRequest:
        sample = asked.sample
        item = build_reward_item(sample)
        item = replace(item, sample_id=f"{sample.sample_id}@{sample.policy_version}")
        media = self._questions.load_media(list_media(sample))
        return self._questions.request(name, item, asked.reward, media=media)

    def _judgement(self, asked: PendingSample, written: GeneratedSample) -> ProducerRecord:
        self._worker.metrics.count_tokens(written.num_sampled_tokens)
        read = self._questions.read(written, asked.reward, seconds=time.monotonic() - asked.since)
        return self._record(asked, read.result, read.text, outcome=read.outcome)

    def _record(
        self,
        asked: PendingSample,
        result: Score | RewardError | None,
        judgement: str = "",
        *,
        outcome: str = "failed",
    ) -> ProducerRecord:
        self._worker.metrics.count_scored(outcome)
        sample = asked.sample
        if isinstance(result, RewardError):
            log.warning("sample.unscored", sample_id=sample.sample_id, error=str(result))
        scored = build_sample_scored(
            sample,
            result,
            reward_name=JUDGED,
            reward_digest=asked.reward.digest,
            judge_response=judgement,
        )
        return self._worker.records.build_for_sample(
            REWARD_SCORES,
            scored,
            prompt_group_id=sample.prompt_group_id,
            policy_version=sample.policy_version,
        )
