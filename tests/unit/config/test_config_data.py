"""The sections `data` and `evaluation`: accepted values, and rejected ones with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relax_events.config import DataConfig, EvaluationConfig, RunConfig

HELD_OUT = {"name": "held-out", "source": "jsonl:x"}


def test_data_is_one_source_or_several_datasets() -> None:
    one = DataConfig(source="jsonl:a", prompt_key="q")
    assert ([part.prompt_key for part in one.parts], one.weights) == (["q"], (1.0,))
    several = DataConfig.model_validate(
        {
            "datasets": [
                {"source": "jsonl:a", "weight": 3},
                {"source": "parquet:b", "prompt_key": "q"},
            ]
        }
    )
    assert [(part.source, part.prompt_key) for part in several.parts] == [
        ("jsonl:a", "prompt"),
        ("parquet:b", "q"),
    ]
    assert several.weights == (3.0, 1.0)
    assert DataConfig.model_validate(several.model_dump(mode="json")) == several


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({}, "the prompts need a source; set data.source"),
        ({"source": "jsonl:a", "datasets": [{"source": "jsonl:b"}]}, "'jsonl:a' and 1"),
        (
            {"datasets": [{"source": "jsonl:b"}], "prompt_key": "q"},
            "data.prompt_key is a dataset's own",
        ),
        (
            {"source": "jsonl:a", "min_prompt_tokens": 9, "max_prompt_tokens": 8},
            "must be 0 or at least min_prompt_tokens = 9, got 8",
        ),
        (
            {"source": "jsonl:a", "pass_rate_range": [0.9, 0.1]},
            r"must be \[low, high\] with low <= high, got \[0.9, 0.1\]",
        ),
        ({"datasets": [{"source": "jsonl:b", "weight": 0}]}, "greater than 0"),
        ({"datasets": [{"source": "jsonl:b", "weight": float("inf")}]}, "finite"),
    ],
)
def test_data_section_rejects_contradictory_keys(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        DataConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("datasets", "complaint"),
    [
        ([HELD_OUT, HELD_OUT], "must have names of their own, got 'held-out' twice"),
        (
            [HELD_OUT | {"pass_at": [1, 8], "samples_per_prompt": 4}],
            "numbers up to samples_per_prompt = 4, got 8",
        ),
        ([HELD_OUT | {"name": "a/b"}], "pattern"),
    ],
)
def test_evaluation_section_rejects_contradictory_datasets(
    datasets: list[dict[str, Any]], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        EvaluationConfig.model_validate({"datasets": datasets})


def test_evaluation_is_due_at_first_last_and_every_nth_version() -> None:
    evaluation = EvaluationConfig.model_validate({"every": 4, "datasets": [HELD_OUT]})
    assert [
        version for version in range(3, 15) if evaluation.is_due(version, first=3, last=14)
    ] == [3, 7, 11, 14]
    assert not EvaluationConfig(every=1).is_due(0, first=0, last=9)


def test_run_with_evaluation_datasets_has_an_evaluator_role() -> None:
    tree: dict[str, Any] = {
        "run": {"id": "r"},
        "model": {"path": "m"},
        "data": {"source": "jsonl:x"},
    }
    assert "evaluator" not in RunConfig.model_validate(tree).roles()
    evaluated = tree | {"evaluation": {"datasets": [HELD_OUT]}}
    assert RunConfig.model_validate(evaluated).roles()["evaluator"] == 1
    assert RunConfig.model_validate(evaluated | {"parent": {"run": "other"}}).roles() == {
        "controller": 1,
        "metrics": 1,
        "trainer": 1,
        "evaluator": 1,
    }


def read_held_out(data: dict[str, Any], held_out: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the keys of an evaluation dataset in a run with these prompts."""
    config = RunConfig.model_validate(
        {
            "run": {"id": "mine", "prompts_per_step": 2, "samples_per_prompt": 2},
            "model": {"path": "model"},
            "data": data,
            "evaluation": {"datasets": [{"name": "held-out"} | held_out]},
        }
    )
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    rows = config.evaluation.datasets[0]
    return rows.prompt_key, rows.prompt_template, rows.answer_key, rows.system_prompt


QUESTIONS = {
    "source": "jsonl:a",
    "prompt_key": "question",
    "answer_key": "solution",
    "system_prompt": "Think.",
}


@pytest.mark.parametrize(
    ("data", "held_out", "keys"),
    [
        (QUESTIONS, {"source": "parquet:b"}, ("question", "", "solution", "Think.")),
        (
            QUESTIONS,
            {"source": "jsonl:b", "prompt_key": "prompt", "system_prompt": ""},
            ("prompt", "", "solution", ""),
        ),
        (
            QUESTIONS,
            {"source": "jsonl:b", "prompt_template": "{q}"},
            ("prompt", "{q}", "solution", "Think."),
        ),
        (
            {"source": "jsonl:a", "prompt_template": "{q}?"},
            {"source": "jsonl:b"},
            ("prompt", "{q}?", "answer", ""),
        ),
        (
            {"source": "jsonl:a", "prompt_template": "{q}?"},
            {"source": "jsonl:b", "prompt_key": "text"},
            ("text", "", "answer", ""),
        ),
        (QUESTIONS, {"source": "reasoning_gym:leg_counting"}, ("prompt", "", "answer", "")),
        (
            {"datasets": [QUESTIONS, {"source": "jsonl:c"}]},
            {"source": "jsonl:b"},
            ("prompt", "", "answer", ""),
        ),
    ],
)
def test_evaluation_takes_the_columns_of_the_prompts(
    data: dict[str, Any], held_out: dict[str, Any], keys: tuple[str, ...]
) -> None:
    assert read_held_out(data, held_out) == keys
