"""Completions of 100 kilobytes that are built to be slow to parse: the time grows with their
length, not with its square.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from relax_events.packages.verifiers.code import is_same_output
from relax_events.packages.verifiers.ifeval import ifeval
from relax_events.packages.verifiers.text_answers import gpqa, gsm8k, multiple_choice

pytestmark = pytest.mark.unit
NUM_CHARACTERS = 100_000
MAX_SECONDS = 5
"""Of processor; where time grows with the square of the length these take many times as long."""


def follow(name: str, **kwargs: int) -> Callable[[str], object]:
    return lambda text: ifeval(
        text, answer="", metadata={"instruction_id_list": [name], "kwargs": [kwargs]}, prompt=""
    )


def call(function: Callable[..., object]) -> Callable[[str], object]:
    return lambda text: function(
        text, answer="5" if function is gsm8k else "A", metadata={}, prompt=""
    )


CASES = [
    (follow("length_constraints:number_sentences", num_sentences=3), "."),
    (follow("detectable_content:number_placeholders", num_placeholders=3), "["),
    (
        follow("detectable_format:number_bullet_lists", num_bullets=3),
        "a" + "\n" * NUM_CHARACTERS + "x",
    ),
    (follow("detectable_format:title"), "<<"),
    (follow("detectable_format:json_format"), "```" + " " * NUM_CHARACTERS + "x"),
    (follow("detectable_format:json_format"), "["),
    (follow("format:thesis"), "<i>"),
    (follow("format:emoji"), "."),
    (call(gpqa), "a" + "\n" * NUM_CHARACTERS + "x"),
    (call(multiple_choice), "<answer>"),
    (call(gsm8k), "1,111"),
    (call(gsm8k), "1/2/"),
    (call(gsm8k), "- "),
    (call(gsm8k), "9"),
    (call(gsm8k), "1e9 "),
    *(
        (function, piece)
        for function in (call(gpqa), call(multiple_choice))
        for piece in (
            *("A, ", "(A) or ", "A\n", "answer is ", "A is not ", "\\boxed{", "a" + "_" * 200),
            *("\u4e0dA\u6216", "A\u2013", "A.A.", "<b", "\ufdfa", "the "),
        )
    ),
]


@pytest.mark.parametrize(("reward", "piece"), CASES)
def test_long_hostile_completion_is_read_in_time(
    reward: Callable[[str], object], piece: str
) -> None:
    text = (piece * (NUM_CHARACTERS // len(piece) + 1))[:NUM_CHARACTERS] + "x"
    started = time.process_time()
    reward(text)
    assert time.process_time() - started < MAX_SECONDS


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1" * NUM_CHARACTERS + "x", "1" * NUM_CHARACTERS + "y"),
        ("1" * NUM_CHARACTERS + ".5", "1" * NUM_CHARACTERS),
        ("0.1 " * (NUM_CHARACTERS // 4), "0.1000001 " * (NUM_CHARACTERS // 4)),
        ("0.1," * (NUM_CHARACTERS // 4), "0.1000001," * (NUM_CHARACTERS // 4)),
        ("1e" * (NUM_CHARACTERS // 2), "1e" * (NUM_CHARACTERS // 2) + "1"),
        ("." * NUM_CHARACTERS, "." * NUM_CHARACTERS + "1"),
        ("1e" + "9" * NUM_CHARACTERS, "2e" + "9" * NUM_CHARACTERS),
    ],
)
def test_long_hostile_output_is_compared_in_time(printed: str, expected: str) -> None:
    started = time.process_time()
    is_same_output(printed, expected)
    assert time.process_time() - started < MAX_SECONDS
