"""Run files whose data bring the completions (SFT and DPO): accepted and rejected settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relax_events.config import DataConfig, EvaluationConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.training.replay.parent_steps import require_compatible_algorithm

SFT: dict[str, Any] = {
    "run": {"id": "test"},
    "model": {"path": "model"},
    "data": {"source": "jsonl:rows", "completion_key": "completion"},
    "algorithm": {"name": "sft"},
}
DPO = SFT | {
    "data": {"source": "jsonl:rows", "chosen_key": "chosen", "rejected_key": "rejected"},
    "algorithm": {"name": "dpo"},
}
GRPO = SFT | {"data": {"source": "jsonl:rows"}, "algorithm": {}}
HELD_OUT = {"name": "held-out", "source": "jsonl:rows"}


@pytest.mark.parametrize(
    ("tree", "size", "others"),
    [(SFT, 1, []), (DPO, 2, ["reference"]), (SFT | {"data": {"source": "jsonl:rows"}}, 1, [])],
    ids=["sft", "dpo", "answers"],
)
def test_offline_algorithm_sets_roles_and_samples_per_prompt(
    tree: dict[str, Any], size: int, others: list[str]
) -> None:
    config = RunConfig.model_validate(tree)
    assert config.run.samples_per_prompt == size
    assert [*config.roles()] == [
        "controller",
        "metrics",
        "prompter",
        "rollout",
        *others,
        "advantage",
        "trainer",
    ]
    assert (config.rollout_engine, config.engine.name) == ("dataset", "transformers")
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_rows_with_a_completion_need_no_reference_answer() -> None:
    assert DataConfig(source="jsonl:x", completion_key="text").answer_key == ""
    assert (
        DataConfig(source="jsonl:x", completion_key="text", answer_key="solution").answer_key
        == "solution"
    )
    assert DataConfig(source="jsonl:x").answer_key == "answer"


def test_evaluation_generates_with_the_engine_of_the_run_file() -> None:
    config = RunConfig.model_validate(
        SFT | {"evaluation": {"datasets": [HELD_OUT | {"sampling": {"temperature": 0.7}}]}}
    )
    assert config.roles()["evaluator"] == 1
    assert isinstance(config.evaluation, EvaluationConfig)


def test_sft_replay_accepts_prompt_groups_of_any_size() -> None:
    replay = {"parent": {"run": "other"}, "run": {"id": "test", "samples_per_prompt": 8}}
    assert (
        RunConfig.model_validate(
            GRPO | replay | {"algorithm": {"name": "sft"}}
        ).run.samples_per_prompt
        == 8
    )
    with pytest.raises(
        ValidationError,
        match="samples_per_prompt must be 2, got 8: algorithm dpo learns from pairs",
    ):
        RunConfig.model_validate(GRPO | replay | {"algorithm": {"name": "dpo"}})


@pytest.mark.parametrize(
    ("recorded", "wanted", "is_refused"),
    [
        (GRPO, SFT, False),
        (SFT, SFT, False),
        (DPO, DPO, False),
        (SFT, GRPO, True),
        (DPO, GRPO, True),
        (DPO, SFT, True),
        (GRPO, DPO, True),
    ],
)
def test_replay_rejects_an_algorithm_that_needs_unrecorded_data(
    recorded: dict[str, Any], wanted: dict[str, Any], is_refused: bool
) -> None:
    source, config = RunConfig.model_validate(recorded), RunConfig.model_validate(wanted)
    algorithms, run_id = (source.algorithm, config.algorithm), source.run.id
    if is_refused:
        with pytest.raises(
            ConfigError,
            match=f"algorithm {config.algorithm.name} learns from .*, and run test recorded",
        ):
            require_compatible_algorithm(*algorithms, run_id=run_id)
    else:
        require_compatible_algorithm(*algorithms, run_id=run_id)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            SFT | {"run": {"id": "test", "samples_per_prompt": 4}},
            "samples_per_prompt must be 1, got 4: algorithm sft learns from answers",
        ),
        (
            DPO | {"run": {"id": "test", "samples_per_prompt": 4}},
            "samples_per_prompt must be 2, got 4: algorithm dpo learns from pairs",
        ),
        (
            GRPO | {"run": {"id": "test", "samples_per_prompt": 1}},
            "samples_per_prompt must be >= 2, got 1: algorithm grpo compares",
        ),
        (
            GRPO
            | {
                "algorithm": {"min_samples_per_group": 1},
                "run": {"id": "test", "samples_per_prompt": 8},
            },
            "min_samples_per_group must be 0, or from 2 to run.samples_per_prompt = 8, got 1",
        ),
        (
            GRPO
            | {
                "algorithm": {"min_samples_per_group": 9},
                "run": {"id": "test", "samples_per_prompt": 8},
            },
            "min_samples_per_group must be 0, or from 2 to run.samples_per_prompt = 8, got 9",
        ),
        (
            SFT | {"algorithm": {"name": "dpo"}},
            (
                "dpo learns from pairs, and jsonl:rows names none; set data.chosen_key and "
                "data.rejected_key"
            ),
        ),
        (
            DPO | {"algorithm": {"name": "sft"}},
            "data.chosen_key = 'chosen' is not used by algorithm sft, which learns from answers",
        ),
        (
            DPO | {"algorithm": {}},
            "data.chosen_key = 'chosen' is not used by algorithm grpo, which learns from rewards",
        ),
        (
            SFT | {"algorithm": {}},
            "data.completion_key = 'completion' is not used by algorithm grpo",
        ),
        (
            SFT | {"engine": {"sampling": {"temperature": 0.5}}},
            "engine.sampling.temperature = 0.5 has no use: algorithm sft generates no samples",
        ),
        (DPO | {"engine": {"sampling": {"top_p": 0.5}}}, "engine.sampling.top_p = 0.5 has no use"),
        (SFT | {"engine": {"sampling": {"top_k": 1}}}, "engine.sampling.top_k = 1 has no use"),
        (
            SFT | {"model": {"path": "m", "routing_replay": "rollout"}},
            "'rollout' replays .*, and algorithm sft generates no samples",
        ),
        (
            GRPO | {"data": {"source": "jsonl:x", "max_sample_tokens": 9}},
            "data.max_sample_tokens = 9 measures answers that the data bring",
        ),
        (
            GRPO | {"engine": {"name": "dataset"}},
            "engine.name = 'dataset' generates nothing, and algorithm grpo learns",
        ),
        (
            SFT | {"engine": {"name": "dataset"}, "evaluation": {"datasets": [HELD_OUT]}},
            "'dataset' generates nothing, and evaluation needs",
        ),
        (
            SFT | {"data": SFT["data"] | {"pass_rate_range": [0.1, 0.9]}},
            r"data.pass_rate_range = \[0.1, 0.9\] filters by rewards, and algorithm sft has none",
        ),
        (
            SFT | {"algorithm": {"name": "sft", "kl_coefficient": 0.1}},
            "kl_coefficient = 0.1 is not for sft: the data's tokens estimate no",
        ),
        (
            SFT | {"algorithm": {"name": "sft", "old_logprobs": "rollout"}},
            "old_logprobs = 'rollout' is not for sft: the tokens are from the data",
        ),
        (
            SFT | {"algorithm": {"name": "sft", "filter_uniform_rewards": True}},
            "filter_uniform_rewards = True is not for sft: there are no rewards",
        ),
        (
            SFT | {"algorithm": {"name": "sft", "dpo_beta": 0.1}},
            "dpo_beta = 0.1 is not used by sft",
        ),
        (
            DPO | {"algorithm": {"name": "dpo", "aggregation": "token_mean"}},
            "aggregation = 'token_mean' is not for dpo: the loss is one of pairs",
        ),
        (
            DPO | {"algorithm": {"name": "dpo", "dpo_beta": 0.0}},
            "algorithm.dpo_beta\n.*greater than 0",
        ),
        (
            DPO | {"algorithm": {"name": "dpo", "label_smoothing": 0.5}},
            "algorithm.label_smoothing\n.*less than 0.5",
        ),
        (
            SFT | {"data": {"source": "jsonl:x", "chosen_key": "chosen"}},
            "chosen_key with rejected_key name what the policy learns, got chosen_key",
        ),
        (
            SFT | {"data": SFT["data"] | {"conversation_key": "c"}},
            "name what the policy learns, got completion_key and conversation_key",
        ),
        (SFT | {"data": SFT["data"] | {"prompt_key": ""}}, "prompt_key must name a column, got ''"),
        (
            SFT | {"data": SFT["data"] | {"train_on": "last"}},
            "train_on = 'last' chooses among a conversation's messages; set conversation_key",
        ),
    ],
)
def test_inconsistent_settings_for_offline_learning_are_rejected(
    tree: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValidationError, match=text):
        RunConfig.model_validate(tree)
