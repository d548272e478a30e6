"""Prompt filters: length, pass rate, a user function."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.config import DataConfig
from relax_events.data.prompt_filter import (
    FilterResult,
    FunctionFilter,
    LengthFilter,
    PassRateFilter,
    RewardHistory,
    build_filters,
)
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import MediaFilter, PromptRow
from relax_events.data.stream import DatasetRow
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer

HOOKS = """
def level(prompt, *, answer, metadata, mean_rewards, train_step):
    return metadata.get("level")

def facts(prompt, *, answer, metadata, mean_rewards, train_step):
    return 1000 * len(prompt) + 100 * len(answer) + 10 * len(mean_rewards) + train_step

def easy(prompt, *, answer, metadata, mean_rewards, train_step):
    return not mean_rewards or mean_rewards[-1] < 1

def broken(prompt, *, answer, metadata, mean_rewards, train_step):
    raise KeyError("no level")

def alone(prompt):
    return len(prompt)

def stepped(prompt, *, train_step):
    return train_step

def words(prompt, *, answer, metadata, mean_rewards, train_step):
    return "later"
"""


def row_of(text: str, metadata: str = "{}") -> PromptRow:
    return PromptRow([ChatMessage.of_text("user", text)], "42", metadata)


@pytest.fixture
def hook_file(tmp_path: Path) -> Path:
    path = tmp_path / "hooks.py"
    path.write_text(HOOKS)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ab", "too_short"), ("abc", 0.0), ("abcde", 0.0), ("abcdef", "too_long")],
)
def test_length_filter_counts_tokens(text: str, expected: FilterResult) -> None:
    # A tokenizer of bytes alone: as many tokens as characters.
    renderer = PromptRenderer(
        train_tokenizer(["x"], vocab_size=256), DataConfig(source="jsonl:x", chat_template=False)
    )
    prompt_filter = LengthFilter(renderer, min_tokens=3, max_tokens=5)
    assert prompt_filter(row_of(text), mean_rewards=(), train_step=0) == expected


@pytest.mark.parametrize(
    ("answer", "expected"), [("abc", 0.0), ("abcd", "answer_too_long"), ("", "answer_refused")]
)
def test_length_filter_counts_the_answer_with_its_stop_token(
    answer: str, expected: FilterResult
) -> None:
    renderer = PromptRenderer(
        train_tokenizer(["x"], vocab_size=256), DataConfig(source="jsonl:x", chat_template=False)
    )
    prompt_filter = LengthFilter(renderer, min_tokens=0, max_tokens=0, max_sample_tokens=6)
    row = PromptRow([ChatMessage.of_text("user", "ab")], answer)
    assert prompt_filter(row, mean_rewards=(), train_step=0) == expected


def test_length_filter_skips_what_the_template_rejects() -> None:
    tokenizer = train_tokenizer(["x"])
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    prompt_filter = LengthFilter(
        PromptRenderer(tokenizer, DataConfig(source="jsonl:x")), min_tokens=1, max_tokens=0
    )
    assert prompt_filter(row_of("hi"), mean_rewards=(), train_step=0) == "refused_by_template"


@pytest.mark.parametrize(
    ("mean_rewards", "expected"),
    [
        ((), 0.0),
        ((0.1,), 0.0),
        ((0.0, 0.9), 0.0),
        ((0.5, 0.05), "pass_rate_too_low"),
        ((0.5, 0.95), "pass_rate_too_high"),
    ],
)
def test_pass_rate_filter_reads_the_newest_mean_reward(
    mean_rewards: tuple[float, ...], expected: FilterResult
) -> None:
    assert (
        PassRateFilter(0.1, 0.9)(row_of("p"), mean_rewards=mean_rewards, train_step=3) == expected
    )


def test_filter_function_ranks_or_skips_a_row(hook_file: Path) -> None:
    prompt_filter = FunctionFilter(f"{hook_file}:level")
    assert prompt_filter(row_of("p", '{"level": 2}'), mean_rewards=(), train_step=0) == 2.0
    assert prompt_filter(row_of("p"), mean_rewards=(), train_step=0) == "prompt_filter"
    easy = FunctionFilter(f"{hook_file}:easy")
    assert [
        easy(row_of("p"), mean_rewards=rewards, train_step=0)
        for rewards in ((), (1.0, 0.5), (1.0,))
    ] == [0.0, 0.0, "prompt_filter"]


def test_filter_function_gets_answer_metadata_rewards_and_step(hook_file: Path) -> None:
    assert (
        FunctionFilter(f"{hook_file}:facts")(
            row_of("abc"), mean_rewards=(0.5, 1.0, 0.0, 0.0), train_step=7
        )
        == 3247.0
    )


def test_filter_function_takes_only_the_arguments_that_it_names(hook_file: Path) -> None:
    for name, expected in (("alone", 3.0), ("stepped", 7.0)):
        chosen = FunctionFilter(f"{hook_file}:{name}")
        assert chosen(row_of("abc"), mean_rewards=(0.5,), train_step=7) == expected


def test_error_names_the_failing_filter_function_and_the_prompt(hook_file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"hooks.py:broken failed with KeyError: 'no level' on prompt 'why\?'"
    ):
        FunctionFilter(f"{hook_file}:broken")(row_of("why?"), mean_rewards=(), train_step=0)
    with pytest.raises(
        ConfigError,
        match=r"hooks.py:words returned 'later' for prompt 'why\?'; it must return a number, True, False or None",
    ):
        FunctionFilter(f"{hook_file}:words")(row_of("why?"), mean_rewards=(), train_step=0)
    with pytest.raises(ConfigError, match=r"data.prompt_filter = .*nowhere.py does not exist"):
        FunctionFilter("nowhere.py:level")


def test_reward_history_keeps_mean_rewards_in_order() -> None:
    history = RewardHistory()
    for reward in (0.25, 0.5):
        history.add(DatasetRow(0, 3), reward)
    assert (list(history[DatasetRow(0, 3)]), list(history[DatasetRow(1, 3)])) == ([0.25, 0.5], [])


def test_prompt_filters_are_built_from_the_run_file(hook_file: Path) -> None:
    renderer = PromptRenderer(
        train_tokenizer(["x"]), DataConfig(source="jsonl:x", chat_template=False)
    )
    every = DataConfig(
        source="jsonl:x",
        max_prompt_tokens=3,
        pass_rate_range=(0.1, 0.9),
        prompt_filter=f"{hook_file}:level",
    )
    assert [type(prompt_filter) for prompt_filter in build_filters(every, renderer=renderer)] == [
        MediaFilter,
        LengthFilter,
        PassRateFilter,
        FunctionFilter,
    ]
    (media_filter,) = build_filters(DataConfig(source="jsonl:x"), renderer=renderer)
    assert isinstance(media_filter, MediaFilter)
