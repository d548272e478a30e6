"""The judge role: its requests to the engine, and the scores it makes of judgements. The engine is
a fake, the tokenizer a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_samples import rolled_out
from pydantic import ValidationError

from relax_events.config import RunConfig
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.data.rendering import load_judge_renderer
from relax_events.engines.protocol import EngineUsage, GeneratedSample, GenerationRequest
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.events.types import SampleScored
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.file_checks import check_judge, check_roles
from relax_events.rewards.run_judge import load_judge_rewards
from relax_events.rewards.scores import Score
from relax_events.roles.judging import open_judge
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.topics import TopicPlan
from relax_events.topics.plan import list_role_inputs
from tests.unit.trainer_samples import tiny_model
from workers.judge import JudgeScorer
from workers.reward import RewardScorer

pytestmark = pytest.mark.unit
MakeRunConfig = Callable[..., RunConfig]
SAMPLES = "rollout.samples"
KEYS = [(SAMPLES, 0, offset) for offset in range(4)]
BY_ROUTE = {
    "function": "exact_match",
    "routes": {"essay": {"function": "genrm", "options": {"max_score": 1}}},
}


class Speaking:
    """An engine that records its requests, and returns the responses that the test sets."""

    def __init__(self, config: RunConfig) -> None:
        self.renderer = load_judge_renderer(config.judge, config.data)
        self.asked: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.saying: list[GeneratedSample] = []
        self.refuses, self.num_tokens, self.usage = False, 0, EngineUsage()

    def submit(self, request: GenerationRequest) -> None:
        if self.refuses:
            raise PoisonSample("the prompt is too long")
        self.asked.append(request)

    def say(
        self, text: str, *, to: int = -1, reason: FinishReason = FinishReason.STOP, error: str = ""
    ) -> None:
        tokens = self.renderer.answer_tokens(text)
        name = self.asked[to].prompt_group_id
        fields = {
            "tokens": tokens,
            "logprobs": np.zeros(len(tokens), np.float32),
            "segments": (VersionSegment(0, len(tokens)),),
        }
        self.saying.append(
            GeneratedSample(
                sample_id=name, prompt_group_id=name, finish_reason=reason, error=error, **fields
            )
        )  # type: ignore[arg-type]

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        said, self.saying = self.saying, []
        return said

    def abort(self, sample_ids: Collection[str]) -> list[GeneratedSample]:
        self.aborted += sample_ids
        return []

    def question(self, index: int = -1) -> str:
        return self.renderer.completion_text(self.asked[index].prompt_tokens)


class Stage:
    """A judge with its engine, and the outcomes that it counted."""

    def __init__(self, config: RunConfig) -> None:
        self.engine: Any = Speaking(config)
        self.counted: list[str] = []
        engine = SimpleNamespace(count_seconds=lambda activity, seconds: None)
        metrics = SimpleNamespace(
            count_tokens=lambda count: None, count_scored=self.counted.append, engine=engine
        )
        worker: Any = SimpleNamespace(
            config=config,
            metrics=metrics,
            records=SimpleNamespace(build_for_sample=lambda topic, event, **_: (topic, event)),
            lifecycle=SimpleNamespace(on_heartbeat=lambda call: None),
            heartbeat=SimpleNamespace(add_metrics_source=lambda source: None),
        )
        self.scorer = JudgeScorer(worker, self.engine, load_judge_rewards(config))

    def answers(self) -> list[SampleScored]:
        records: list[Any] = [
            record for _, records in self.scorer.poll(timeout_seconds=0) for record in records
        ]
        assert {topic for topic, _ in records} <= {"reward.scores"}
        return [event for _, event in records]


@pytest.fixture
def make_stage(make_run_config: MakeRunConfig) -> Callable[..., Stage]:
    def make(*, reward: dict[str, Any] | None = None, **judge: Any) -> Stage:
        return Stage(
            make_run_config(
                reward=reward or {"function": "genrm"}, judge={"model_path": tiny_model(), **judge}
            )
        )

    return make


def test_judge_prompt_renders_the_template_with_the_judges_chat_template(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(
        reward={"function": "genrm", "options": {"template": "reference", "max_score": 1}},
        engine={"sampling": {"top_k": 1}},
    )
    stage.scorer.submit(
        KEYS[0],
        rolled_out(completion="<think>hm</think>four", answer="4", metadata='{"rubric": "none"}'),
    )
    question, request = stage.engine.question(), stage.engine.asked[0]
    assert "[Question]\nsay hi\n\n[Reference]\n4\n\n[Answer to check]\nfour\n" in question
    assert "Score: 1 if it agrees" in question
    assert "hm" not in question
    assert (request.sampling.top_k, request.sampling.max_new_tokens) == (1, 1024)
    assert request.stop_token_ids == stage.engine.renderer.stop_token_ids


def test_judge_score_is_read_from_the_last_line_and_the_response_is_kept(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage()
    stage.scorer.submit(KEYS[0], rolled_out(index=0))
    stage.scorer.submit(KEYS[1], rolled_out(index=1))
    assert stage.scorer.capacity == 62
    stage.engine.say("Score: 1 would be unfair.\nScore: 7.5", to=1)
    (scored,) = stage.answers()
    assert (scored.sample_id, scored.reward, scored.components, scored.reward_name) == (
        rolled_out(index=1).sample_id,
        0.75,
        {},
        "genrm",
    )
    assert scored.judge_response == "Score: 1 would be unfair.\nScore: 7.5"
    assert scored.error is None
    assert (stage.scorer.capacity, stage.counted) == (63, ["scored"])


def test_judge_seed_depends_only_on_the_sample(
    make_stage: Callable[..., Stage], make_run_config: MakeRunConfig
) -> None:
    seeds = []
    for _ in range(2):
        stage = make_stage()
        for index in (0, 1):
            stage.scorer.submit(KEYS[index], rolled_out(index=index))
        seeds.append([request.samples[0].seed for request in stage.engine.asked])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


@pytest.mark.parametrize(
    ("text", "reason", "error"),
    [
        ("I refuse.", FinishReason.STOP, "the judge's answer has no line 'Score: N': 'I refuse.'"),
        ("Score: 11", FinishReason.STOP, "the judge's score must be between 0 and 10, got 11"),
        (
            "Well",
            FinishReason.LENGTH,
            "'Well'; it was cut off after 5 tokens, see judge.engine.sampling.max_new_tokens",
        ),
    ],
)
def test_judge_response_without_a_score_fails_or_scores_zero(
    text: str, reason: FinishReason, error: str, make_stage: Callable[..., Stage]
) -> None:
    for unreadable, reward in (("fail", None), ("zero", 0.0)):
        stage = make_stage(on_parse_error=unreadable)
        stage.scorer.submit(KEYS[0], rolled_out())
        stage.engine.say(text, reason=reason)
        (scored,) = stage.answers()
        assert (scored.reward, scored.judge_response, stage.counted) == (
            reward,
            text,
            ["unreadable"],
        )
        assert (scored.error is None) == (unreadable == "zero")
        assert unreadable == "zero" or error in str(scored.error)


def test_sample_that_cannot_be_judged_fails_regardless_of_on_parse_error(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(on_parse_error="zero")
    stage.scorer.submit(KEYS[0], rolled_out(metadata="{"))
    stage.engine.refuses = True
    stage.scorer.submit(KEYS[1], rolled_out())
    stage.engine.refuses = False
    stage.scorer.submit(KEYS[2], rolled_out())
    stage.engine.say("Score: 1", reason=FinishReason.ERROR, error="the server is gone")
    errors = [scored.error for scored in stage.answers()]
    assert str(errors[0]).startswith(
        "the judge request can't be made: the sample's metadata is no JSON: "
    )
    assert errors[1:] == [
        "the judge request can't be made: the prompt is too long",
        "the judge's engine failed: the server is gone",
    ]
    assert stage.counted == ["failed"] * 3


def test_cancelled_samples_are_aborted_and_get_no_score(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    for index in (0, 1):
        stage.scorer.submit(KEYS[index], rolled_out(index=index))
    stage.scorer.cancel(KEYS[:1])
    assert stage.engine.aborted == [stage.engine.asked[0].prompt_group_id]
    stage.engine.say("Score: 1", to=0)
    stage.engine.say("Score: 2", to=1)
    assert [scored.reward for scored in stage.answers()] == [0.2]


def test_judge_responses_do_not_depend_on_the_submission_order(
    make_run_config: MakeRunConfig,
) -> None:
    engine = {
        "max_context_tokens": 1024,
        "max_running_samples": 4,
        "sampling": {"max_new_tokens": 6, "temperature": 1.0},
    }
    judge = {
        "model_path": tiny_model(),
        "on_parse_error": "zero",
        "device": "cpu",
        "engine": engine,
    }
    config, reported = make_run_config(reward={"function": "genrm"}, judge=judge), []
    for order in ([0, 1, 2], [2, 0, 1]):
        stage = Stage(config)
        stage.scorer._engine = opened = open_judge(config, metrics=WorkerMetrics("judge").routing)
        for index in order:
            stage.scorer.submit(KEYS[index], rolled_out(index=index))
        assert stage.scorer.capacity == 1
        answers: list[SampleScored] = []
        while len(answers) < 3:
            answers += stage.answers()
        assert stage.scorer.progress > 0
        reported.append({scored.sample_id: scored.judge_response for scored in answers})
        opened.close()
    assert reported[0] == reported[1]
    assert len(set(reported[0].values())) == 3, "each sample has a seed of its own"


def test_each_sample_is_scored_by_either_judge_or_reward_role(
    make_stage: Callable[..., Stage], make_run_config: MakeRunConfig
) -> None:
    samples = [
        rolled_out(index=index, metadata=metadata)
        for index, metadata in enumerate(('{"data_source": "essay"}', "{}", '{"data_source": 3}'))
    ]
    stage = make_stage(reward=BY_ROUTE)
    for key, sample in zip(KEYS, samples, strict=False):
        stage.scorer.submit(key, sample)
    stage.engine.say("Score: 1")
    assert [(scored.sample_id, scored.reward) for scored in stage.answers()] == [
        (samples[0].sample_id, 1.0)
    ]

    config = make_run_config(reward=BY_ROUTE, judge={"model_path": tiny_model()})
    assert config.computed_reward is not None
    assert config.computed_reward.routes == {}
    scoring = RewardScorer(SimpleNamespace(config=config), SimpleNamespace())  # type: ignore[arg-type]
    assert [scoring._is_ours(sample) for sample in samples] == [False, True, True]
    assert {"reward", "judge"} <= config.roles().keys()
    turned = {
        "function": "genrm",
        "routes": {"sum": {"function": "gsm8k"}, "essay": {"function": "genrm"}},
    }
    computed = make_run_config(reward=turned, judge={"model_path": tiny_model()}).computed_reward
    assert computed is not None
    assert (computed.function, list(computed.routes)) == ("gsm8k", ["sum"])


def test_judge_takes_the_place_of_the_reward_role(make_run_config: MakeRunConfig) -> None:
    config = make_run_config(
        reward={"function": "genrm"},
        judge={"model_path": tiny_model()},
        workers={"judge": 2},
        broker={"partitions_per_version": 4},
    )
    assert config.roles()["judge"] == 2
    assert "reward" not in config.roles()
    assert "judge x 2" in check_roles(CheckedRun(config))
    inputs = list_role_inputs(config)
    assert inputs["judge"] == [SAMPLES]
    assert "reward.scores" in inputs["advantage"]
    pool = ScalingBounds.from_config(config, is_supervised=True).pools["judge"]
    assert (pool.num_at_start, pool.max_workers) == (
        2,
        TopicPlan.from_config(config).num_sample_partitions,
    )
    assert "judge" not in make_run_config().roles()
    assert (
        "judge"
        not in make_run_config(
            judge={"model_path": tiny_model()}, reward={"function": "genrm"}, parent={"run": "old"}
        ).roles()
    )


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (
            {"reward": {"function": "math"}},
            (
                "judge.model_path is of no use with reward.function = 'math', which uses no "
                "judge; set reward.function"
            ),
        ),
        (
            {"reward": {"function": "genrm", "options": {"url": "http://j"}}},
            "reward.options.url and judge.model_path name two judges; leave url out",
        ),
        (
            {
                "reward": {"function": "genrm"},
                "evaluation": {
                    "datasets": [
                        {
                            "name": "a",
                            "source": "jsonl:unused",
                            "reward": {
                                "function": "genrm",
                                "routes": {
                                    "x": {"function": "genrm", "options": {"url": "http://j"}}
                                },
                            },
                        }
                    ]
                },
            },
            "evaluation dataset a has two judges: genrm with options.url, and judge.model_path",
        ),
        (
            {
                "reward": {"function": "genrm"},
                "judge": {"engine": {"name": "sglang"}},
                "health": {"progress_timeout_seconds": 700},
            },
            (
                "health.progress_timeout_seconds must be above 720, got 700: for "
                "judge.engine.sglang.stall_seconds"
            ),
        ),
    ],
)
def test_judge_settings_inconsistent_with_the_run_are_rejected(
    sections: dict[str, Any], error: str, make_run_config: MakeRunConfig
) -> None:
    sections["judge"] = sections.get("judge", {}) | {"model_path": tiny_model()}
    with pytest.raises(ValidationError, match=error):
        make_run_config(**sections)


def test_judge_model_is_checked_before_the_run_starts(
    make_run_config: MakeRunConfig, tmp_path: Any
) -> None:
    def config(path: Any = None, **reward: Any) -> RunConfig:
        return make_run_config(
            reward={"function": "genrm"} | reward, judge={"model_path": path or tiny_model()}
        )

    assert check_judge(CheckedRun(config())) == f"{tiny_model()} on engine transformers"
    assert check_judge(CheckedRun(make_run_config())) == "none: judge.model_path is not given"
    both = make_run_config(reward=BY_ROUTE, judge={"model_path": tiny_model()})
    assert (
        check_judge(CheckedRun(both))
        == f"{tiny_model()} on engine transformers, for 1 of 2 sources"
    )
    with pytest.raises(
        ConfigError, match=r"judge.model_path .* holds no config.json with \*.safetensors"
    ):
        check_judge(CheckedRun(config(tmp_path)))
    with pytest.raises(
        ConfigError,
        match=r"reward.options.temperature configures a judge server, but judge.model_path gives the run its own judge",
    ):
        check_judge(CheckedRun(config(options={"temperature": 0.5})))
    with pytest.raises(
        ConfigError, match=r"reward.options.template must be rubric, reference, pair or a text"
    ):
        check_judge(CheckedRun(config(options={"template": "grade"})))
    with pytest.raises(
        ConfigError, match=r"reward.weights names accuracy, and a judge returns only reward"
    ):
        load_judge_rewards(config(weights={"accuracy": 1.0}))
    with pytest.raises(ConfigError, match=r"the judge role has no model; set judge.model_path"):
        open_judge(make_run_config(), metrics=WorkerMetrics("judge").routing)


def test_judge_reward_digest_covers_template_model_and_sampling(
    make_run_config: MakeRunConfig,
) -> None:
    def digest(*, options: dict[str, Any] | None = None, **judge: Any) -> str:
        config = make_run_config(
            reward={"function": "genrm", "options": options or {}},
            judge={"model_path": tiny_model(), **judge},
        )
        return load_judge_rewards(config)[None].digest

    digests = [
        digest(),
        digest(),
        digest(options={"rubric": "Is it kind?"}),
        digest(engine={"sampling": {"top_k": 1}}),
        digest(on_parse_error="zero"),
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_judge_of_media_must_read_them(make_run_config: MakeRunConfig) -> None:
    judge = {"model_path": tiny_model(), "media": {}}
    with pytest.raises(
        ConfigError, match=r"\[judge.media\] is set, and the model .* reads text only"
    ):
        check_judge(CheckedRun(make_run_config(reward={"function": "genrm"}, judge=judge)))


@pytest.mark.parametrize(("on_timeout", "reward"), [(-1.0, -1.0), ("none", None)])
def test_lost_and_late_samples_are_not_judged(
    make_stage: Callable[..., Stage], on_timeout: Any, reward: float | None
) -> None:
    stage = make_stage(reward={"function": "genrm", "on_timeout": on_timeout})
    for key, reason in zip(KEYS, (FinishReason.LATE, FinishReason.LOST), strict=False):
        stage.scorer.submit(key, rolled_out(index=key[2], finish_reason=reason))
    late, lost = stage.answers()
    assert (late.reward, late.error, lost.reward, lost.error) == (reward, None, None, None)
    assert (stage.engine.asked, stage.counted) == ([], ["skipped", "skipped"])


@pytest.mark.parametrize(("on_timeout", "reward"), [(-1.0, -1.0), ("none", None)])
def test_reward_role_calls_no_function_for_lost_and_late_samples(
    make_run_config: MakeRunConfig, on_timeout: Any, reward: float | None
) -> None:
    called: list[str] = []
    counted: list[str] = []

    def score_batch(items: Any, **_: Any) -> list[Score]:
        called.extend(item.sample_id for item in items)
        return [Score(1.0, {}) for _ in items]

    worker: Any = SimpleNamespace(
        config=make_run_config(reward={"on_timeout": on_timeout}),
        metrics=SimpleNamespace(count_scored=counted.append),
        records=SimpleNamespace(build_for_samples=lambda _, events: events),
        lifecycle=SimpleNamespace(activity=lambda *_, **__: nullcontext()),
        heartbeat=SimpleNamespace(advance=lambda: None),
    )
    pool: Any = SimpleNamespace(
        score_batch=score_batch, name="f", digest="d", max_response_seconds=1.0
    )
    reasons = (FinishReason.LATE, FinishReason.STOP, FinishReason.LOST)
    samples = [
        rolled_out(index=index, of=3, finish_reason=reason) for index, reason in enumerate(reasons)
    ]
    events: Any = RewardScorer(worker, pool)(samples)
    assert [(event.reward, event.error) for event in events] == [
        (reward, None),
        (1.0, None),
        (None, None),
    ]
    assert called == [samples[1].sample_id]
    assert counted == ["skipped", "scored", "skipped"]
