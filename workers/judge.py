"""The judge role: a model of the run grades every sample.

Consumes rollout.samples, produces SampleScored on reward.scores: for the samples whose reward
function is `genrm`, in place of the reward role. A worker generates many judgements concurrently on
its own engine, and writes each score as soon as it is ready. If a judgement holds no score, its
sample fails with the judgement's text, or gets 0 (`judge.on_parse_error`). A sample for which no
judge prompt can be built fails.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

import numpy as np
import orjson
import structlog

from relax_events.config import RunConfig
from relax_events.config.judge import JUDGED
from relax_events.data.rendering import load_judge_renderer
from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest, SampleRequest
from relax_events.errors import ConfigError, PoisonSample, RewardError
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord
from relax_events.rewards.run_judge import JudgeReward, load_judge_rewards
from relax_events.rewards.scores import Score, parse_score
from relax_events.rewards.scoring import build_reward_item, build_sample_scored, read_source
from relax_events.roles.engine_factory import open_engine
from relax_events.roles.engine_monitor import EngineMonitor
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.concurrent_processor import ConcurrentLoop, Done, Key
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.telemetry.component_metrics import ReplicaMetrics

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


def open_judge(config: RunConfig, *, metrics: ReplicaMetrics) -> Engine:
    """Load the judge model on its engine.

    Raises:
        ConfigError: The run has no judge, its engine is not installed, or its model can't be
            loaded.
    """
    judge = config.judge
    if judge.model_path is None:
        raise ConfigError(
            "the judge role has no model; set judge.model_path to the folder of its checkpoint"
        )
    judge_run = config.model_copy(
        update={"model": judge.as_model(judge.model_path), "engine": judge.engine}
    )
    return open_engine(judge_run, name=judge.engine.name, metrics=metrics)


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
        self._renderer = load_judge_renderer(worker.config.judge, worker.config.data)
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
        asked = PendingSample(key, sample, reward, time.monotonic())
        name = str(next(self._numbers))
        try:
            self._engine.submit(self._request(name, asked))
        except (PoisonSample, RewardError) as error:
            self._done.append(
                (
                    key,
                    (
                        self._record(
                            asked, RewardError(f"the judge request can't be made: {error}")
                        ),
                    ),
                )
            )
        else:
            self._asked[name] = asked

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
        dropped, wanted = (
            [name for name, asked in self._asked.items() if asked.key in keys],
            set(keys),
        )
        for name in dropped:
            del self._asked[name]
        self._done = [done for done in self._done if done[0] not in wanted]
        self._engine.abort(dropped)

    def _request(self, name: str, asked: PendingSample) -> GenerationRequest:
        item = build_reward_item(asked.sample)
        metadata = _metadata(item.metadata)
        question = asked.reward.grading.build_prompt(
            item.completion, answer=item.answer, metadata=metadata, prompt=item.prompt
        )
        named = (
            f"{self._worker.config.run.seed}/{asked.sample.sample_id}@{asked.sample.policy_version}"
        )
        seed = int.from_bytes(
            hashlib.blake2b(named.encode(), digest_size=7).digest()
        )  # the seed: a retry after a crash gives the same judgement
        tokens, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return GenerationRequest(
            prompt_group_id=name,
            prompt_tokens=self._renderer.prompt_tokens([ChatMessage.of_text("user", question)]),
            samples=(
                SampleRequest(
                    sample_id=name, seed=seed, tokens=tokens, logprobs=logprobs, segments=()
                ),
            ),
            sampling=self._judge.engine.sampling,
            stop_token_ids=self._renderer.stop_token_ids,
        )

    def _judgement(self, asked: PendingSample, written: GeneratedSample) -> ProducerRecord:
        self._worker.metrics.count_tokens(written.num_sampled_tokens)
        if written.finish_reason is FinishReason.ERROR:
            return self._record(asked, RewardError(f"the judge's engine failed: {written.error}"))
        text = self._renderer.completion_text(written.tokens)
        try:
            score = parse_score(
                asked.reward.grading.score(text),
                weights=asked.reward.weights,
                seconds=time.monotonic() - asked.since,
            )
        except RewardError as error:
            return self._unreadable(asked, written, text, error)
        return self._record(asked, score, text, outcome="scored")

    def _unreadable(
        self, asked: PendingSample, written: GeneratedSample, text: str, error: RewardError
    ) -> ProducerRecord:
        """Build the score of an unparsable judgement: a failure, or 0 with `judge.on_parse_error =
        "zero"`.
        """
        cut = (
            f"; it was cut off after {written.num_sampled_tokens} tokens, see "
            "judge.engine.sampling.max_new_tokens"
        )
        failure = RewardError(
            f"{error}{cut if written.finish_reason is FinishReason.LENGTH else ''}"
        )
        zero = Score(0.0, {}, time.monotonic() - asked.since)
        return self._record(
            asked,
            zero if self._judge.on_parse_error == "zero" else failure,
            text,
            outcome="unreadable",
        )

    def _record(
        self,
        asked: PendingSample,
        result: Score | RewardError,
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
            "reward.scores",
            scored,
            prompt_group_id=sample.prompt_group_id,
            policy_version=sample.policy_version,
        )


def _metadata(text: str) -> dict[str, object]:
    try:
        metadata = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RewardError(f"the sample's metadata is no JSON: {error}") from None
    return metadata if isinstance(metadata, dict) else {}
