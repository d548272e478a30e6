"""Rewards that compare text: exact match, final numbers, and SQuAD's metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from relax_events.packages.examples.deepeyes import score as deepeyes
from relax_events.packages.verifiers.math_answers import (
    dapo_math,
    deepscaler,
    find_after_reasoning,
    find_answer_line,
    find_math,
    geo3k,
    math,
    openr1_multimodal,
)
from relax_events.packages.verifiers.text_answers import (
    exact_match,
    explain_gsm8k,
    f1,
    gsm8k,
    multiple_choice,
    squad_exact_match,
)

pytestmark = pytest.mark.unit


def call(function: Any, completion: str, answer: str) -> float:
    return function(completion, answer=answer, metadata={}, prompt="")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("cat", "cat", 1.0), (" cat\n", "cat", 1.0), ("Cat", "cat", 0.0), ("", "cat", 0.0)],
)
def test_exact_match_compares_without_surrounding_space(
    completion: str, answer: str, reward: float
) -> None:
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


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### \u22125", "-5"),
        ("#### - 5", "-5"),
        ("\u5f97\u5230-5\u5143", "-5"),
        ("\u6e29\u5ea6\u662f\ufe635\u5ea6", "-5"),
        ("\uff0d\uff15", "-5"),
        ("it is \u20135", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("so 10-5", "5"),
        ("pages 5\u20137", "7"),
        ("\u5171\u670912\u4e2a\u82f9\u679c", "12"),
        ("\u5171\u67091\uff0c000\u4e2a", "1000"),
        ("so 1/2", "0.5"),
        ("it is 2 2/3 cups", "8/3"),
        ("#### 1e3", "1000"),
        ("1,00,000 rupees", "100000"),
        ("1,2,3", "3"),
        ("5 m2", "5"),
        ("5 m\u00b2", "5"),
        ("2\u00bd cups", "5/2"),
        (r"so \frac{1}{2}", "1/2"),
        ("12 g of H\u2082O", "12"),
        ("1000 = 10^3", "1000"),
    ],
)
def test_gsm8k_reads_a_number_as_one_token(completion: str, answer: str) -> None:
    assert call(gsm8k, completion, answer) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "1 or 2",
        "not 2",
        "x^2",
        "5 = 5^{2}",
        "H_2O",
        "it isn't 2",
        "1/2",
        "\u22122",
        "1\u6216\u80052",
        "3 2/5",
        "1,002",
    ],
)
def test_gsm8k_takes_no_part_of_a_number_and_no_denied_one(completion: str) -> None:
    assert call(gsm8k, completion, "2") == 0.0


@pytest.mark.parametrize("answer", ["none", "####", "1 or 2", '["5", "none"]'])
def test_gsm8k_fails_when_the_reference_has_no_number(answer: str) -> None:
    with pytest.raises(ValueError, match=r"ends with no number .*; see data.answer_key"):
        call(gsm8k, "5", answer)


def test_gsm8k_compares_numbers_of_any_length() -> None:
    long = "1" * 5000
    assert call(gsm8k, f"#### {long}", long) == 1.0
    assert call(gsm8k, f"#### {long}", "1" * 4999) == 0.0
    assert call(gsm8k, f"{long} so it is 5", "5") == 1.0


SQUAD_EXACT = [
    ("The Eiffel Tower.", "eiffel tower", 1.0),
    ("an  Apple", "apple", 1.0),
    ("apples", "apple", 0.0),
    ("<think>pear</think> the apple!", "apple", 1.0),
    ("I say <answer>Apple</answer> and so on", "apple", 1.0),
    ("apple", '["pear", "Apple"]', 1.0),
    ("apple", '["pear", "plum"]', 0.0),
    ("", "apple", 0.0),
    ("anthem", "them", 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "reward"), SQUAD_EXACT)
def test_squad_exact_match_ignores_case_articles_and_punctuation(
    completion: str, answer: str, reward: float
) -> None:
    assert call(squad_exact_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("the cat sat", "cat sat", 1.0),
        ("cat sat on mat", "cat sat", 2 * (2 / 4) * 1 / (2 / 4 + 1)),  # precision 2/4, recall 1
        ("cat cat", "cat dog", 0.5),  # a repeated word counts as often as both have it
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("cat", '["dog", "cat sat", "cat sat down"]', 2 / 3),
    ],
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(
    completion: str, answer: str, reward: float
) -> None:
    assert call(f1, completion, answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    "function",
    [
        *(f1, squad_exact_match, gsm8k, multiple_choice, math, deepscaler, dapo_math, geo3k),
        *(openr1_multimodal, find_math, find_after_reasoning, find_answer_line, explain_gsm8k),
    ],
)
@pytest.mark.parametrize("answer", ["", "  ", "[]", '["", " "]'])
@pytest.mark.parametrize("completion", ["", "no answer", "<answer>1</answer><answer>2</answer>"])
def test_missing_reference_fails_instead_of_scoring_zero(
    function: Any, answer: str, completion: str
) -> None:
    with pytest.raises(
        ValueError, match=r"the sample has no reference answer; see data.answer_key"
    ):
        call(function, completion, answer)


@pytest.mark.parametrize("function", [exact_match, partial(deepeyes, turns=[])])
def test_missing_reference_is_no_empty_answer(function: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the sample has no reference answer; see data.answer_key"
    ):
        call(function, "", " ")
