"""The reward hub: built-in functions, files of the user's, and what may be returned."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.errors import ConfigError
from relax_events.rewards.hub import Score, as_score, load_reward
from relax_events.rewards.text_match import exact_match, gsm8k


def call(function: Any, completion: str, answer: str) -> float:
    return function(completion, answer=answer, metadata={}, prompt="")


@pytest.mark.parametrize(("completion", "answer", "reward"), [("cat", "cat", 1.0), (" cat\n", "cat", 1.0), ("Cat", "cat", 0.0), ("", "cat", 0.0)])
def test_exact_match_compares_without_surrounding_space(completion: str, answer: str, reward: float) -> None:
    assert call(exact_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("2 + 2 = 1,004\n#### 1,004", 1.0),
        ("so it is 1004.00", 1.0),
        ("#### $1004 dollars", 1.0),
        ("#### 1004 of 5000", 1.0),
        ("#### 3, no: #### 1004", 1.0),
        ("#### -1004", 0.0),
        ("1004 or 5000", 0.0),
        ("####", 0.0),
        ("none", 0.0),
    ],
)
def test_gsm8k_compares_the_final_numbers(completion: str, reward: float) -> None:
    assert call(gsm8k, completion, "work 7 * 8\n#### 1004") == reward


def test_gsm8k_gives_nothing_when_the_reference_has_no_number() -> None:
    assert call(gsm8k, "none", "none") == 0.0


def test_hub_versions_a_function_by_the_file_that_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(completion, *, answer, metadata, prompt):\n    return len(completion)\n")
    loaded = load_reward(f"{file}:score")
    assert call(loaded.function, "four", "") == 4
    assert loaded.digest == hashlib.sha256(file.read_bytes()).hexdigest()


def test_hub_knows_its_built_in_functions() -> None:
    assert load_reward("exact_match").function is exact_match
    assert load_reward("gsm8k").function is gsm8k
    assert load_reward("reasoning_gym").name == "reasoning_gym"


@pytest.mark.parametrize(
    ("source", "function", "text"),
    [
        (None, "score", "reward file .*mine.py does not exist; set reward.function"),
        ("def other(): pass\n", "score", "has no function 'score', only other"),
        ("score = 3\n", "score", "has no function 'score', only none"),
        ("def score(:\n", "score", "mine.py has a syntax error in line 1"),
        ("import not_a_module\n", "score", "mine.py failed to load: ModuleNotFoundError: No module named 'not_a_module'"),
        ("1 / 0\n", "score", "mine.py failed to load: ZeroDivisionError"),
    ],
)
def test_hub_says_why_a_file_can_not_be_loaded(tmp_path: Path, source: str | None, function: str, text: str) -> None:
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ConfigError, match=text):
        load_reward(f"{file}:{function}")


@pytest.mark.parametrize("name", ["exact_mach", "mine.py", "mine.txt:score", "mine.py:"])
def test_hub_lists_its_names_when_one_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"reward.function must be exact_match, gsm8k, reasoning_gym or path/to/file.py:function"):
        load_reward(name)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.5, Score(0.5, {})),
        (True, Score(1.0, {})),
        (np.float32(0.25), Score(0.25, {})),
        ({"form": 0.25, "content": 0.5}, Score(0.75, {"form": 0.25, "content": 0.5})),
        ({"reward": 2, "content": 0.5}, Score(2.0, {"content": 0.5})),
    ],
)
def test_score_takes_numbers_and_components(value: Any, score: Score) -> None:
    assert as_score(value) == score


@pytest.mark.parametrize("value", [None, "1", [1.0], {}, {"a": "1"}, {1: 1.0}, 1j])
def test_score_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=r"it must return a number or a dict of numbers"):
        as_score(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {"a": math.nan}])
def test_score_refuses_what_is_not_finite(value: Any) -> None:
    with pytest.raises(ValueError, match=r"rewards must be finite"):
        as_score(value)
