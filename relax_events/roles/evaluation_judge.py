"""The judge of evaluations: the evaluator asks the judge model on a second engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from relax_events.config import RewardConfig, RunConfig
from relax_events.data.rows import PromptRow
from relax_events.engines.protocol import Engine, GeneratedSample
from relax_events.errors import MediaError, PoisonSample, RewardError
from relax_events.events.json_text import parse_json
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.run_judge import JudgeReward, load_judge_rewards
from relax_events.rewards.scores import Score
from relax_events.roles.judging import JudgeQuestions

Judged = tuple[GeneratedSample, Score | RewardError]


@dataclass(frozen=True, slots=True)
class _Asked:
    sample: GeneratedSample
    reward: JudgeReward
    since: float


class EvaluationJudge:
    """Judges completions of evaluations, many at once. Used by one thread."""

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        """Load the judge's tokenizer and the rewards of all datasets.

        Args:
            config: The run; its evaluation datasets say what is judged.
            engine: Holds the judge model; idle.
        Raises:
            ConfigError: An option of a reward does not fit, or the judge's model is missing.
        """
        self._engine = engine
        self._questions = JudgeQuestions(config)
        self._rewards = {
            dataset.name: load_judge_rewards(config, dataset.reward or config.reward)
            for dataset in config.evaluation.datasets
        }
        self._asked: dict[str, _Asked] = {}
        self._failed: list[Judged] = []
        self._numbers = count()

    def get_rewards(self, dataset: str) -> dict[str | None, JudgeReward]:
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
            self._engine.submit(request)
        except (PoisonSample, RewardError, MediaError) as error:
            failure = RewardError(f"the judge request can't be made: {error}")
            self._failed.append((sample, failure))
        else:
            self._asked[name] = _Asked(sample, reward, time.monotonic())

    def poll(self, *, timeout_seconds: float) -> list[Judged]:
        """Return judged completions, waiting for the first; at once when nothing is judged."""
        done, self._failed = self._failed, []
        if self._asked:
            for written in self._engine.poll(timeout_seconds=0.0 if done else timeout_seconds):
                if (asked := self._asked.pop(written.prompt_group_id, None)) is not None:
                    seconds = time.monotonic() - asked.since
                    read = self._questions.read(written, asked.reward, seconds=seconds)
                    done.append((asked.sample, read.result))
        return done

    def abort(self) -> None:
        """Drop all completions that are being judged."""
        self._engine.abort()
        self._asked, self._failed = {}, []

    @property
    def num_tokens(self) -> int:
        """Tokens that the judge has generated so far."""
        return self._engine.num_tokens


def choose_judge_reward(
    rewards: Mapping[str | None, JudgeReward], reward: RewardConfig, metadata: str
) -> JudgeReward | None:
    """Return the judge reward of a completion with this metadata; None if another function scores
    it.
    """
    try:
        tree: Any = parse_json(metadata)
    except ValueError:
        tree = {}
    return rewards.get(reward.find_source(tree if isinstance(tree, dict) else {}))
