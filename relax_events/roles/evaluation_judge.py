"""The judge of evaluations: the evaluator asks the judge model on an engine of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import orjson

from relax_events.config import RewardConfig, RunConfig
from relax_events.data.rows import PromptRow
from relax_events.engines.protocol import Engine, GeneratedSample
from relax_events.errors import MediaError, PoisonSample, RewardError
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.run_judge import JudgeReward, load_judge_rewards
from relax_events.rewards.scores import Score
from relax_events.roles.judging import JudgeQuestions, open_judge
from relax_events.telemetry.component_metrics import ReplicaMetrics

Judged = tuple[GeneratedSample, Score | RewardError]


@dataclass(frozen=True, slots=True)
class _Asked:
    sample: GeneratedSample
    reward: JudgeReward
    since: float


class EvaluationJudge:
    """Judges completions of evaluations, many at once. Used by one thread.

    The engine is loaded with the first completion, and stays until `close`.
    """

    def __init__(
        self, config: RunConfig, *, metrics: ReplicaMetrics, engine: Engine | None = None
    ) -> None:
        """Load the judge's tokenizer and the rewards of all datasets.

        Args:
            config: The run; its evaluation datasets say what is judged.
            metrics: Of the engine's servers.
            engine: An open engine of the judge model; by default the judge's own.
        Raises:
            ConfigError: An option of a reward does not fit, or the judge's model is missing.
        """
        self._config, self._metrics, self._engine = config, metrics, engine
        self._questions = JudgeQuestions(config)
        self._rewards = {
            dataset.name: load_judge_rewards(config, dataset.reward or config.reward)
            for dataset in config.evaluation.datasets
        }
        self._asked: dict[str, _Asked] = {}
        self._failed: list[Judged] = []
        self._numbers = count()

    @property
    def num_waiting(self) -> int:
        """Completions that are being judged."""
        return len(self._asked) + len(self._failed)

    def rewards_of(self, dataset: str) -> dict[str | None, JudgeReward]:
        """Return the judged sources of a dataset, with their rewards."""
        return self._rewards[dataset]

    def submit(
        self, sample: GeneratedSample, item: RewardItem, reward: JudgeReward, *, row: PromptRow
    ) -> None:
        """Begin to judge a completion; `poll` returns it once.

        Args:
            sample: The completion.
            item: What the judge reads of it.
            reward: Template and rubric of its source.
            row: The row of the dataset, for its media.
        """
        name = str(next(self._numbers))
        try:
            library = self._questions.library
            media = [] if library is None else [library.preprocess(one) for one in row.media]
            request = self._questions.request(name, item, reward, media=media)
            self._opened().submit(request)
        except (PoisonSample, RewardError, MediaError) as error:
            failure = RewardError(f"the judge request can't be made: {error}")
            self._failed.append((sample, failure))
        else:
            self._asked[name] = _Asked(sample, reward, time.monotonic())

    def poll(self, *, timeout_seconds: float) -> list[Judged]:
        """Return judged completions, waiting for the first; at once when nothing is judged."""
        done, self._failed = self._failed, []
        if self._asked:
            for written in self._opened().poll(timeout_seconds=0.0 if done else timeout_seconds):
                if (asked := self._asked.pop(written.prompt_group_id, None)) is not None:
                    seconds = time.monotonic() - asked.since
                    read = self._questions.read(written, asked.reward, seconds=seconds)
                    done.append((asked.sample, read.result))
        return done

    def abort(self) -> None:
        """Drop all completions that are being judged."""
        if self._engine is not None:
            self._engine.abort()
        self._asked, self._failed = {}, []

    @property
    def num_tokens(self) -> int:
        """Tokens that the judge has generated so far."""
        return 0 if self._engine is None else self._engine.num_tokens

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()

    def _opened(self) -> Engine:
        if self._engine is None:
            self._engine = open_judge(self._config, metrics=self._metrics)
        return self._engine


def choose_judge_reward(
    rewards: Mapping[str | None, JudgeReward], reward: RewardConfig, metadata: str
) -> JudgeReward | None:
    """Return the judge reward of a completion with this metadata; None if another function scores
    it.
    """
    try:
        tree: Any = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        tree = {}
    return rewards.get(reward.source_of(tree if isinstance(tree, dict) else {}))
