"""Rewards for questions with choices."""

from __future__ import annotations

from typing import Any

import pytest

from relax_events.packages.verifiers.text_answers import gpqa, multiple_choice

pytestmark = pytest.mark.unit
CHOICES = ["a red star", "a white dwarf", "a black hole", "a red giant"]


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{(C)}}, not A", "C"),
        ("<think>The answer is A.</think> The answer is (D).", "D"),
        ("Answer: C", "C"),
        ("**Answer**: **C**", "C"),
        ("the correct answer is option B", "B"),
        ("<answer>D</answer>", "D"),
        ("First I thought answer A. Now my answer is B.", "B"),
        ("(A) is wrong\nB) it is", "B"),
        ("It must be a black hole.", "C"),
        ("It is the White Dwarf", "B"),
        ("I answer:\nD", "D"),
        (r"so \boxed{C. a black hole}", "C"),
        (r"so \boxed{\text{(C) a black hole}}", "C"),
        ("A is wrong and C is correct", "C"),
        ("**C** is the best choice", "C"),
        ("Answer: I think option B", "B"),
    ],
)
def test_gpqa_extracts_the_chosen_letter(completion: str, letter: str) -> None:
    for other in "ABCD":
        reward = gpqa(
            completion, answer="", metadata={"correct_letter": other, "choices": CHOICES}, prompt=""
        )
        assert reward == float(other == letter)


@pytest.mark.parametrize(
    "completion",
    ["", "I don't know", "a black hole or a red giant", "The answer is a matter of taste"],
)
def test_gpqa_gives_zero_reward_when_no_choice_was_made(completion: str) -> None:
    assert [
        gpqa(completion, answer=letter, metadata={"choices": CHOICES}, prompt="")
        for letter in "ABCD"
    ] == [0.0] * 4


def test_gpqa_accepts_choices_up_to_z_without_a_list() -> None:
    assert gpqa("Answer: X", answer="X", metadata={}, prompt="") == 1.0


def test_gpqa_takes_the_letter_from_the_reference_answer_or_its_text() -> None:
    assert gpqa("Answer: C", answer="(C)", metadata={}, prompt="") == 1.0
    assert gpqa("Answer: C", answer="A black hole", metadata={"choices": CHOICES}, prompt="") == 1.0


@pytest.mark.parametrize(
    ("answer", "metadata"),
    [("", {}), ("none of them", {"choices": CHOICES}), ("", {"correct_letter": "AB"})],
)
def test_gpqa_fails_without_a_correct_letter(answer: str, metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the right letter must be one of A to Z"):
        gpqa("Answer: A", answer=answer, metadata=metadata, prompt="")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<answer>B</answer>", "B", 1.0),
        ("<answer> (b). </answer>", "B", 1.0),
        ("<answer>A</answer> no, <answer>B</answer>", "<answer>B</answer>", 1.0),
        ("<answer>red giant</answer>", "Red giant", 1.0),
        ("<answer>A</answer>", "B", 0.0),
        ("<answer></answer>", "B", 0.0),
        ("B", "B", 0.0),
        ("", "B", 0.0),
    ],
)
def test_multiple_choice_compares_the_content_of_the_answer_tag(
    completion: str, answer: str, reward: float
) -> None:
    assert multiple_choice(completion, answer=answer, metadata={}, prompt="") == reward


@pytest.mark.parametrize("answer", ["", "<answer></answer>", "()"])
def test_multiple_choice_rejects_an_empty_reference_answer(answer: str) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        multiple_choice("", answer=answer, metadata={}, prompt="")
