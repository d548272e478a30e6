"""An evaluation whose completions a judge of the run scores. Both engines are fakes, the tokenizers
real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer, load_judge_renderer
from relax_events.data.rows import PromptRow
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.events.parts import ChatMessage, FinishReason, VersionSegment
from relax_events.roles.evaluation_judge import EvaluationJudge
from relax_events.roles.evaluation_pass import EvaluationPass
from tests.unit.trainer_samples import tiny_model

ROWS = [
    PromptRow([ChatMessage.of_text("user", f"say {word}")], answer=word, metadata=metadata)
    for word, metadata in (("one", "{}"), ("two", '{"data_source": "sums"}'), ("three", "{}"))
]


class Replying:
    """An engine that answers each request at the next poll."""

    policy_version = 0

    def __init__(self, renderer: PromptRenderer, reply: Callable[[str], str]) -> None:
        self._renderer, self._reply = renderer, reply
        self.requests: list[GenerationRequest] = []
        self.aborted = 0
        self.reasons: dict[str, FinishReason] = {}
        self.num_tokens = 0
        self._waiting: list[GenerationRequest] = []

    @property
    def num_running(self) -> int:
        return sum(len(request.samples) for request in self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._waiting.append(request)

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        waiting, self._waiting = self._waiting, []
        return [
            self._answer(request, sample.sample_id)
            for request in waiting
            for sample in request.samples
        ]

    def _answer(self, request: GenerationRequest, sample_id: str) -> GeneratedSample:
        prompt = self._renderer.completion_text(request.prompt_tokens)
        tokens = self._renderer.answer_tokens(self._reply(prompt))
        self.num_tokens += len(tokens)
        return GeneratedSample(
            sample_id=sample_id,
            prompt_group_id=request.prompt_group_id,
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            segments=(VersionSegment(0, len(tokens)),),
            finish_reason=self.reasons.get(sample_id, FinishReason.STOP),
        )

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        self.aborted += 1
        return []

    def close(self) -> None: ...


class Computed:
    """A pool whose function gives every completion half a point."""

    name, digest = "sums: gsm8k", "d1"

    def __init__(self) -> None:
        self.scored: list[str] = []

    def score_batch(self, items: Any, *, on_answer: Any) -> list[Any]:
        self.scored += [item.sample_id for item in items]
        return [SimpleNamespace(reward=0.5) for _ in items]


@pytest.fixture
def make_judged(make_run_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    def make(**reward: Any) -> RunConfig:
        dataset = {"name": "held", "source": "jsonl:unused", "samples_per_prompt": 2}
        return make_run_config(
            model={"path": tiny_model()},
            reward={"function": "genrm", "options": {"max_score": 4}} | reward,
            judge={"model_path": tiny_model()},
            evaluation={"datasets": [dataset]},
        )

    return make


def run_pass(
    config: RunConfig,
    judge_says: Callable[[str], str],
    rewards: Computed | None,
    reasons: dict[str, FinishReason] | None = None,
) -> tuple[Any, Replying]:
    """Evaluate the rows; return the metrics and the judge's engine.

    Samples in `reasons` end so, all others with a stop."""
    policy = PromptRenderer.from_folder(config.model.path, config.data)
    judge: Any = Replying(load_judge_renderer(config.judge, config.data), judge_says)
    source: Any = SimpleNamespace(num_rows=len(ROWS), row=ROWS.__getitem__)
    engine: Any = Replying(policy, lambda prompt: prompt.split()[-1])
    engine.reasons = reasons or {}
    pool: Any = rewards
    one = EvaluationPass(
        config.evaluation.datasets[0],
        source,
        engine=engine,
        renderer=policy,
        library=SimpleNamespace(),  # type: ignore[arg-type]
        rewards=pool,
        judge=EvaluationJudge(config, judge),
        config=config,
    )
    for _ in range(10):
        if not one.is_finished:
            one.step()
    assert one.is_finished
    assert one.num_tokens == engine.num_tokens + judge.num_tokens
    return one.result(policy_version=0, weights_digest=b"", seconds=1.0), judge


def test_evaluation_is_scored_by_the_judge(make_judged: Callable[..., RunConfig]) -> None:
    config = make_judged()
    assert config.judged_datasets == {"held"}

    def says(question: str) -> str:
        return "Score: 4" if "say one" in question else "Score: 1" if "say two" in question else "?"

    result, judge = run_pass(config, says, None)
    assert len(judge.requests) == 6
    assert len({request.samples[0].seed for request in judge.requests}) == 6
    # the third row's two judgements hold no score, so the mean is of the others
    assert (result.num_unscored, result.reward_name) == (2, "genrm")
    assert result.reward_mean == pytest.approx((1.0 + 0.25) / 2)
    assert len(result.reward_digest) == 64
    again, judge_again = run_pass(config, says, None)
    assert (again.reward_mean, again.reward_digest) == (result.reward_mean, result.reward_digest)
    seeds = [[request.samples[0].seed for request in one.requests] for one in (judge, judge_again)]
    assert seeds[0] == seeds[1], "another version of the policy is judged with the same draws"


def test_sources_of_other_functions_are_scored_by_them(
    make_judged: Callable[..., RunConfig],
) -> None:
    pool = Computed()
    config = make_judged(routes={"sums": {"function": "gsm8k"}})
    result, judge = run_pass(config, lambda _: "Score: 4", pool)
    assert (len(judge.requests), pool.scored) == (4, ["held/1/0", "held/1/1"])
    assert result.reward_mean == pytest.approx((1 + 0.5 + 1) / 3)
    assert result.reward_name == "sums: gsm8k; genrm"


@pytest.mark.parametrize(
    ("on_timeout", "late_rewards", "num_unscored"), [(-1.0, [-1.0], 1), ("none", [], 2)]
)
def test_late_completion_is_a_wrong_one_and_a_lost_one_is_unscored(
    make_judged: Callable[..., RunConfig],
    on_timeout: Any,
    late_rewards: list[float],
    num_unscored: int,
) -> None:
    config = make_judged(on_timeout=on_timeout)
    reasons = {"held/0/0": FinishReason.LATE, "held/1/0": FinishReason.LOST}
    result, judge = run_pass(config, lambda _: "Score: 4", None, reasons)
    assert (len(judge.requests), result.num_unscored) == (4, num_unscored)
    assert result.reward_mean == pytest.approx(np.mean([np.mean([*late_rewards, 1.0]), 1, 1]))


def test_evaluation_by_a_judge_needs_one(make_run_config: Callable[..., RunConfig]) -> None:
    dataset = {"name": "a", "source": "jsonl:unused", "reward": {"function": "genrm"}}
    with pytest.raises(
        ValidationError, match=r"evaluation dataset a is scored by genrm, which nee"
    ):
        make_run_config(evaluation={"datasets": [dataset]})
    with_url = dataset | {"reward": {"function": "genrm", "options": {"url": "http://judge"}}}
    config = make_run_config(
        evaluation={"datasets": [with_url]},
        reward={"function": "genrm"},
        judge={"model_path": tiny_model()},
    )
    assert config.judged_datasets == frozenset()
