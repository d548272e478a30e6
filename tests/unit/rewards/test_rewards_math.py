"""Rewards for mathematics: which expressions are equal, where the answer is found, and what can't
be decided.
"""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction
from typing import Any

import pytest

from relax_events.errors import RewardError
from relax_events.packages.verifiers.answer_extraction import last_box
from relax_events.packages.verifiers.math_answers import (
    dapo_math,
    deepscaler,
    geo3k,
    math,
    openr1_multimodal,
)
from relax_events.packages.verifiers.math_equality import are_equal
from relax_events.packages.verifiers.math_numbers import read_number

pytestmark = pytest.mark.unit


def call(function: Any, completion: str, answer: str, **options: Any) -> Any:
    return function(completion, answer=answer, metadata={}, prompt="", **options)


SAME = [
    ("42", "42.0"),
    ("1,000,000", "1000000"),
    (r"\frac12", "0.5"),
    (r"\dfrac{3}{6}", "1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("0.333333", r"\frac{1}{3}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\left(0, 1\right]", "(0,1]"),
    (r"\{2, 1\}", r"\{1, 2\}"),
    (r"50\%", "50"),
    ("x = 5", "5"),
    (r"30^\circ", "30"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"2\pi", r"2 \pi"),
    (r"5 \text{ cm}", "5"),
    (r"2\pi", "2*pi"),
    (r"\frac{\pi}{2}", "pi/2"),
    ("x^2", "x**2"),
    ("x^{10}", "x**10"),
    ("10000", "1e4"),
    (r"2\sqrt{3}", "2*sqrt(3)"),
    (r"x = 2\pi", "x = 2*pi"),
    (r"17 \bmod 5", "2"),
    (r"17 \bmod 5 = 2", "2"),
    (r"32,\! 349", "32349"),
    ("14{,}916", "14916"),
    ("1,22", "1.22"),
    (r"1 - e^{-1}", r"1 - \frac{1}{\mathrm{e}}"),
    ("2 2/3", "8/3"),
    ("11 5/6", "71/6"),
    ("-1 1/2", "-1.5"),
    ("\u22121 1/2", "-1.5"),
    (r"2\frac{2}{3}", "2 2/3"),
    (r"6\frac{1}{4}\%", "6.25"),
    ("2516_8", "2516_{8}"),
    ("(2516)_8", r"2516_{\text{eight}}"),
    (r"2x \text{ for all real } x", "2x"),
    (r"n(n+1), \text{ where } n \ge 1", "n(n+1)"),
    (r"5 \text{ with equality when } x=y", "5"),
    (r"0.1\overline{6}", "1/6"),
    (r"\text{5 apples}", "5"),
    ("90\u00b0", "90"),
    (r"1200\text{ cm}", r"12\text{ m}"),
    (r"2\text{ hours}", r"120\text{ minutes}"),
    ("2.5 million", "2500000"),
    (r"3\text{ thousand dollars}", r"\$3{,}000"),
    ("1414.21356", r"1000\sqrt{2}"),
    (r"\frac{1}{2006!}", r"\frac{1}{2006 \cdot 2005!}"),
    (r"x \ge 0", r"[0, \infty)"),
    (r"\emptyset", r"\varnothing"),
    (r"10\, \mathrm{m\,s^{-1}}", "10"),
    (r"\begin{pmatrix} 2 2/3 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 8/3 \\ 1 \end{pmatrix}"),
]
DIFFERENT = [
    ("42", "43"),
    (r"\frac{1}{3}", "0.34"),
    ("(0,1)", "(0,1]"),
    (r"\{1, 2\}", r"\{1, 3\}"),
    ("x+1", "x+2"),
    ("1,2", "12"),
    (r"\frac{1}", "1"),
    ("a", "b"),
    ("", "5"),
    (r"\frac{1}{0}", "5"),
    ("100, 200", "100200"),
    ("32, 349", "32349"),
    ("x > 2", r"x \neq 2"),
    (r"x \neq 2", "x > 2"),
    (r"x \neq 3", r"x \neq 2"),
    (r"17 \bmod 5", "17"),
    ("**", "2"),
    ("2*x(", "2"),
    ("sin", "3*sin"),
    ("1e999", "3"),
    ("2 2/3", "22/3"),
    ("4 10/3", "410/3"),
    (r"4\frac{10}{3}", "22/3"),
    ("1 2", "12"),
    ("5 6", "11"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    ("2^{-98}", "2^{-99}"),
    (r"\frac{1}{3\cdot2^{2006}}", r"\frac{2^{2005}+1}{3\cdot2^{2006}}"),
    ("(2^{-98}, 1)", "(2^{-99}, 1)"),
    ("2^{-98}x", "2^{-99}x"),
    ("0.0000001", "0.0000002"),
    (r"1.5\times10^{-8}", "1.6e-8"),
    (r"\frac{\pi}{10^{20}}", r"\frac{2\pi}{10^{20}}"),
    ("2^{400}", "2^{400}+1"),
    ("2516_8", "2516_{9}"),
    ("2516_8", "2516"),
    ("1101_2", "13"),
    (r"12 \text{ m}", r"12 \text{ cm}"),
    (r"5\text{ is wrong}", "5"),
    (r"3x\text{ if }x>0", "3x"),
    (r"x=2 \text{ or } x=3", "2"),
    (r"2x \text{ for } x>0, 3x \text{ for } x<0", "2x"),
    ("5d", "5"),
    ("12:00", "1:00"),
    (r"\text{not even}", "even"),
    ("teams", "meats"),
]


@pytest.mark.parametrize(("given", "wanted"), SAME)
def test_answers_are_equal_in_mathematics(given: str, wanted: str) -> None:
    assert are_equal(given, wanted)
    assert call(math, rf"so it is \boxed{{{given}}}.", wanted) == 1.0


@pytest.mark.parametrize(("given", "wanted"), DIFFERENT)
def test_answers_are_not_equal_in_mathematics(given: str, wanted: str) -> None:
    assert not are_equal(given, wanted)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("9^{9^{9^{9}}}", "more than 10000000 bits"),
        ("(10^{10})!", "more than 10000000 bits"),
        ("(" * 900 + "1" + ")" * 900, "nests 900 brackets, at most 30 are compared"),
        ("1" * 3000, "longer than 2000 characters"),
    ],
)
def test_undecidable_answer_fails_instead_of_scoring_zero(given: str, text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RewardError, match=text):
        call(math, rf"\boxed{{{given}}}", "42")
    assert time.perf_counter() - started < 60


def test_plain_numbers_are_read_as_exact_fractions() -> None:
    assert read_value(r"-\frac{2}{6}") == Fraction(-1, 3)
    assert read_value("0.125") == Fraction(1, 8)
    assert read_value("7/21") == Fraction(1, 3)
    assert [read_value(text) for text in ("1/0", "x", "2^3", "")] == [None] * 4


def read_value(text: str) -> Fraction | None:
    number = read_number(text)
    return None if number is None else number.value


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed 4$", "4"),
        (r"\boxed{ \{1\} }", r"\{1\}"),
        (r"\boxed{5", None),
        ("5", None),
        (r"\boxed{}", None),
    ],
)
def test_last_box_is_found_with_its_braces(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"<think>\boxed{1}</think> so \boxed{17}", 1.0),
        (r"<think>\boxed{17}</think> it is clear", 0.0),
        ("The final answer is 17.", 1.0),
        ("we get $x = 17$", 1.0),
        ("3 and 4 make 17", 1.0),
        ("17 and 4", 0.0),
        ("", 0.0),
        ("The answer is: 17", 1.0),
        ("**Answer:** 17", 1.0),
        ("The answer is **17**.", 1.0),
        ("The answer is $17$ dollars.", 1.0),
        ("The answer is 17, which is prime", 1.0),
        ("The answer is 16. No, the answer is 17.", 1.0),
        ("Final Answer: The final answer is $17$. I hope it is correct.", 1.0),
        (
            "Final Answer: The final answer is $17$. I hope it is correct." + " Thank you." * 200,
            1.0,
        ),
        (r"\boxed{4} more. Final Answer: The final answer is $17$. I hope it is correct.", 1.0),
        (r"The final answer is 4. I hope \boxed{17} is correct.", 1.0),
        ("it is 10+7", 1.0),
        (r"it is \frac{34}{2}", 1.0),
        (r"it is \frac{1}{17}", 0.0),
        ("it is .17", 0.0),
        ("it is A17B", 0.0),
        (r"\boxed{16} or \boxed{17}", 0.0),
    ],
)
def test_math_uses_the_last_stated_answer_when_there_is_no_box(
    completion: str, reward: float
) -> None:
    assert call(math, completion, "17") == reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("it is .4", "0.4"),
        ("The answer is Evelyn.", "Evelyn"),
        ("The answer is not prime.", r"\text{not prime}"),
        ("The answer is neither", "neither"),
        ("The answer is: **x + 1**", "1+x"),
        (r"\boxed{1} and \boxed{2}", r"\{2, 1\}"),
        (r"\boxed{1}, so once more \boxed{1}", "1"),
    ],
)
def test_math_reads_a_stated_answer_completely(completion: str, answer: str) -> None:
    assert call(math, completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"\boxed{1, 2}", 1.0),
        (r"\boxed{2} and \boxed{1}", 1.0),
        (r"\boxed{1}", 0.0),
        (r"\boxed{2}", 0.0),
    ],
)
def test_math_requires_all_boxes_of_the_reference(completion: str, reward: float) -> None:
    assert call(math, completion, r"$\boxed{1}$ papers and $\boxed{2}$ bins") == reward


@pytest.mark.parametrize("answer", ["2", r"\boxed{2}"])
def test_math_compares_only_the_last_box_when_configured(answer: str) -> None:
    completion = r"It is \boxed{1} and \boxed{2}."
    assert (call(math, completion, answer), call(math, completion, answer, boxes="last")) == (
        0.0,
        1.0,
    )
    assert call(math, completion, r"$\boxed{1}$ papers and $\boxed{2}$ bins", boxes="last") == 0.0
    assert call(math, completion, answer, boxes="last", box_only=True) == 1.0
    assert call(math, r"The final answer is 2. I hope it is correct.", answer, boxes="last") == 1.0


CHOICES = [
    ("The answer is 5 or 6.", None),
    ("The answer is not 5.", None),
    ("The answer isn't 5.", None),
    ("The answer could be 5.", None),
    ("Perhaps the answer is 5", None),
    ("It is not 4, so the answer is 5.", "5"),
    ("The answer is not 5 but 6.", None),
    ("The answer is unknown. 5", None),
    ("The wrong answer is 5", None),
    ("It is either 5 or 6", None),
    ("It is 4 or 5", None),
    ("It is not 5", None),
    ("It is 6 apples and 5 pears", None),
    ("The answer is 5x", None),
    ("The answer is (4, 5)", None),
    ("it is 3x + 5", None),
    ("The answer is $x^2 + 5$", None),
    (r"not \boxed{5}", None),
    (r"\boxed{5} is wrong.", None),
    (r"4 or \boxed{5}", None),
    (r"\boxed{4} or \boxed{5}", None),
    (r"Write it in \boxed{}.", None),
    (r"\boxed{5", None),
    ("The answer is 5, not 6.", "5"),
    ("The answer is 5 because 2 + 3 = 5.", "5"),
    ("The value of $x$ is $5$", "5"),
    ("The answer is that there are 5 apples.", "5"),
    ("## Final Answer\n\n**5**", "5"),
    ("The answer is\n\\[\n5\n\\]", "5"),
    ("The answer to the question is 5", "5"),
    ("\u7b54\u6848\u662f5\u3002", "5"),
    ("\u7b54\u6848\uff1a\uff15", "5"),
    ("\u6240\u4ee5\u662f5\u4e2a", "5"),
    ("so the number is not 4 which is 5", "5"),
    ("So he made 8,000-7,995=$5", "5"),
    ("The girls who could not come are 10/2=5 girls.", "5"),
    ("In May and June he had 2 + 3 = 5 apples.", "5"),
    ("Out of the 200, 200 x 1/40 = 5 flowers.", "5"),
    ("8 Points:25(.20)=5 bucks", "5"),
    ("So $x=6$ or $x=5$.", None),
    ("The answer is negative 5", None),
    ("The answer is 5 million", None),
    ("The answer is twice 5", None),
    ("It is the square root of 5", None),
    ("It is at least 5", None),
    ("The answer is 5 less than x", None),
    ("The answer is 5 squared", None),
    ("The answer is given by 5; check: 6", "5"),
    ("Answer: 5 - it is a prime", "5"),
    (r"\boxed{5}, not \boxed{6}", "5"),
    (r"\boxed{5} (write it in \boxed{})", "5"),
    (r"The answer is 5. Write it in \boxed{\text{answer}}.", "5"),
    ("5", "5"),
    ("**5** cm", "5"),
]


@pytest.mark.parametrize(("completion", "choice"), CHOICES)
def test_denied_doubted_or_listed_number_is_not_chosen(completion: str, choice: str | None) -> None:
    assert call(math, completion, "5") == float(choice == "5")


@pytest.mark.parametrize("function", [deepscaler, geo3k, openr1_multimodal])
def test_boxes_of_an_answer_are_one_setting(function: Any) -> None:
    completion = r"<think>a</think><answer>It is \boxed{1} and \boxed{2}.</answer>"

    def accuracy(answer: str, boxes: str) -> float:
        result = call(function, completion, answer, boxes=boxes)
        return result["accuracy"] if isinstance(result, dict) else result

    assert [accuracy("2", boxes) for boxes in ("last", "joined")] == [1.0, 0.0]
    assert [accuracy("1, 2", boxes) for boxes in ("last", "joined")] == [0.0, 1.0]
    joins = function is openr1_multimodal  # math-verify, which it calls, reads all joined boxes
    assert call(function, completion, "1, 2") == call(
        function, completion, "1, 2", boxes="joined" if joins else "last"
    )


def test_reference_with_boxes_far_from_each_other_is_rejected() -> None:
    with pytest.raises(ValueError, match="boxes 1, 2 far from each other"):
        call(
            math,
            r"\boxed{2}",
            r"First \boxed{1}. Then there is much more to say before the second part of all this is done. So \boxed{2}.",
        )


HOSTILE = [
    "$ ",
    "$",
    "1 ",
    "1+",
    " 1 111",
    "answer: $",
    "answer is ",
    "final answer is ",
    " (1",
    r"\( 1",
    r"\[ 1",
    "$1$ and ",
    r"\boxed{",
    r"\boxed{1} ",
    r"\frac{1",
    " -(-1",
    "\\",
    "I hope ",
    "1 1/2 ",
    r"\text{a}",
    "or ",
    "5 or ",
    "answer is 1, which ",
    " the answer to ",
    "x=",
    " \u2013 1",
    "\u662f1",
    r"\begin{a}",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_100_kilobyte_completion_is_scored_within_the_time_limit(piece: str) -> None:
    completion = (piece * 100_000)[:100_000]
    started = time.process_time()
    with contextlib.suppress(RewardError):
        call(math, completion, "17")
    assert time.process_time() - started < 5


def test_math_can_require_a_boxed_answer() -> None:
    assert call(math, "The answer is 17.", "17", box_only=True) == 0.0


@pytest.mark.parametrize("answer", [r"so \boxed{17}", "3 + 14\n#### 17", '["16", "17"]', "17"])
def test_math_reads_the_reference_answer_in_common_forms(answer: str) -> None:
    assert call(math, r"\boxed{17}", answer) == 1.0


@pytest.mark.parametrize("function", [math, deepscaler, dapo_math, geo3k, openr1_multimodal])
def test_math_without_a_reference_is_a_failure(function: Any) -> None:
    with pytest.raises(ValueError, match="no reference answer"):
        call(function, r"<think></think> \boxed{1}", "")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"<think>\boxed{1}</think> \boxed{\frac{4}{2}}", 1.0),
        (r"### Response \boxed{2}", 1.0),
        (r"###Response \boxed{2}", 1.0),
        (r"\boxed{2}", 0.0),
        (r"<think>\boxed{2}</think> two", 0.0),
        ("<think>so</think><|begin_of_box|>$\\frac{4}{2}$<|end_of_box|>", 1.0),
        ("<think>so</think><|begin_of_box|>1<|end_of_box|> <|begin_of_box|>2<|end_of_box|>", 1.0),
        (
            "<think>so</think><|begin_of_box|>2<|end_of_box|> no, <|begin_of_box|>1<|end_of_box|>",
            0.0,
        ),
        ("<think>so</think><|begin_of_box|>2", 0.0),
        ("<think><|begin_of_box|>2<|end_of_box|></think> two", 0.0),
    ],
)
def test_deepscaler_requires_a_box_after_the_reasoning(completion: str, reward: float) -> None:
    assert call(deepscaler, completion, "2") == reward


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("so\nAnswer: 34", True),
        ("Answer: $34$", True),
        (r"ANSWER: \boxed{34}", True),
        ("Answer: x = 34 degrees", True),
        ("Answer: 1\nAnswer: 34", True),
        ("Answer: 34\nAnswer: 1", False),
        ("34", False),
        ("Answer: 34" + " " * 300, False),
        ("Answer:\n34", True),
        ("Answer: The value is $34$.", True),
        ("Answer: **34**", True),
        ("Answer: The value is $35$.", False),
        ("", False),
    ],
)
def test_dapo_reads_the_last_answer_line_of_the_last_300_characters(
    completion: str, is_right: bool
) -> None:
    assert call(dapo_math, completion, "34") == {
        "reward": 1.0 if is_right else -1.0,
        "accuracy": float(is_right),
    }


def test_dapo_takes_another_reward_for_wrong_answers() -> None:
    assert call(dapo_math, "Answer: 1", "34", wrong_reward=0.0) == {"reward": 0.0, "accuracy": 0.0}


@pytest.mark.parametrize(
    ("completion", "accuracy", "form"),
    [
        (r"<think>a</think> \boxed{3}", 1.0, 1.0),
        (r"<think>a</think> \boxed{4}", 0.0, 1.0),
        (r"\boxed{3}", 1.0, 0.0),
        ("3", 0.0, 0.0),
    ],
)
def test_geo3k_weights_accuracy_and_format_nine_to_one(
    completion: str, accuracy: float, form: float
) -> None:
    found = call(geo3k, completion, "3")
    assert found == {
        "reward": pytest.approx(0.9 * accuracy + 0.1 * form),
        "accuracy": accuracy,
        "format": form,
    }


@pytest.mark.parametrize(
    ("completion", "accuracy", "form"),
    [
        ("<think>a</think><answer>0.5</answer>", 1.0, 1.0),
        ("<think>a</think>\n<answer>\\boxed{\\frac{1}{2}}</answer>\n", 1.0, 1.0),
        ("<answer>1/2</answer>", 1.0, 0.0),
        ("<think>a</think><answer>2</answer>", 0.0, 1.0),
        ("<think>a</think>0.5", 0.0, 0.0),
        ("<think>a</think><answer>1</answer><answer>0.5</answer>", 0.0, 0.0),
    ],
)
def test_openr1_multimodal_gives_accuracy_and_format(
    completion: str, accuracy: float, form: float
) -> None:
    components = call(openr1_multimodal, completion, "<answer>1/2</answer>")
    assert (components["accuracy"], components["format"]) == (accuracy, form)
    assert components["reward"] == accuracy + form


def test_openr1_multimodal_compares_words_as_text() -> None:
    assert (
        call(openr1_multimodal, "<think>a</think><answer>Left turn</answer>", "left turn")[
            "accuracy"
        ]
        == 1.0
    )


@pytest.mark.parametrize(
    "reference",
    ["1e999999999", "(x + y)**1000000", "[" * 40 + "]" * 40, "-" * 5000 + "1"],
)  # fmt: skip
def test_reference_that_takes_long_to_compare_is_an_error_or_text(reference: str) -> None:
    try:
        score = math(r"\boxed{42}", answer=reference, metadata={}, prompt="")
    except RewardError:
        return
    assert score == 0.0


THOUGHT, TAGGED = "<think>a</think>", "<answer>2</answer>"


@pytest.mark.parametrize(
    ("completion", "options", "accuracy", "has_form", "tags"),
    [
        (f"{THOUGHT}{TAGGED}", {}, 1, 1, 1),
        (f"\n{THOUGHT}\n{TAGGED}\n", {}, 1, 1, 1),
        (f"so {THOUGHT}{TAGGED}", {}, 1, 0, 1),
        (f"{THOUGHT} so {TAGGED}", {}, 1, 0, 1),
        (f"{TAGGED}{THOUGHT}", {}, 1, 0, 1),
        (TAGGED, {}, 1, 0, 0.5),
        (f"<think>a{TAGGED}", {}, 1, 0, 0.75),
        (f"{THOUGHT}{THOUGHT}{TAGGED}", {}, 0, 0, 0.5),
        (f"{THOUGHT}{TAGGED}{TAGGED}", {"form": "think"}, 0, 0, 1),
        (f"a</think>{TAGGED}", {}, 1, 0, 0.75),
        (f"a</think>{TAGGED}", {"opened": True}, 1, 1, 1),
        (f"{THOUGHT}{TAGGED}", {"opened": True}, 0, 0, 0.75),
        (f"{THOUGHT} so {TAGGED} it is", {"form": "answer"}, 1, 1, 1),
        ("</answer>2<answer>", {"form": "answer"}, 0, 0, 1),
        (f"{THOUGHT} so [2]", {"form": "think", "within": "brackets"}, 1, 1, 1),
        (f"{THOUGHT} so [[2]]", {"form": "think", "within": "brackets"}, 1, 1, 1),
        (f"{THOUGHT} so [1] [4/2].", {"form": "think", "within": "brackets"}, 1, 1, 1),
        (f"{THOUGHT} not [2]", {"form": "think", "within": "brackets"}, 0, 1, 1),
        (f"{THOUGHT} [1] or [2]", {"form": "think", "within": "brackets"}, 0, 1, 1),
        (f"{THOUGHT} [2](address)", {"form": "think", "within": "brackets"}, 0, 1, 1),
        (f"{THOUGHT} [[2], [3]]", {"form": "think", "within": "brackets"}, 0, 1, 1),
        ("<think>[2]</think>", {"form": "think", "within": "brackets"}, 0, 0, 1),
        ("<think>[2]", {"form": "think", "within": "brackets"}, 1, 0, 0.5),
        (f"{THOUGHT} 2]", {"form": "think", "within": "brackets"}, 0, 1, 1),
    ],
)
def test_form_of_tags_and_place_of_the_answer_are_options(
    completion: str, options: dict[str, Any], accuracy: float, has_form: float, tags: float
) -> None:
    assert call(openr1_multimodal, completion, "2", **options) == {
        "reward": accuracy + has_form,
        "accuracy": accuracy,
        "format": has_form,
        "tags": tags,
    }


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{\text{(B)}\ 5}", "5", 1.0),
        (r"\boxed{\textbf{(B) }5}", "5", 1.0),
        (r"$\boxed{\mathrm{(E)}\ \frac{1}{2}}$", "1/2", 1.0),
        (r"\boxed{\text{(B)}\ 5}", r"\text{(B)}\ 5", 1.0),
        (r"\boxed{\text{(B)}\ 5}", r"\text{(C)}\ 5", 0.0),
        (r"\boxed{\text{(B)}}", "B", 1.0),
        (r"\boxed{\text{(B)}}", "5", 0.0),
        (r"\boxed{\text{(B) or (C)} 5}", "5", 0.0),
        (r"\boxed{3}... wait, that's not right. \boxed{4}", "4", 1.0),
        (r"\boxed{3}... wait, that's not right. \boxed{4}", "3", 0.0),
        (r"\boxed{3}, no, \boxed{4}", "4", 1.0),
        (r"It is \boxed{3}, or rather \boxed{4}", "3", 0.0),
        (r"\boxed{3} and \boxed{4}", "3, 4", 1.0),
        (r"\boxed{3} and \boxed{4}", "4", 0.0),
    ],
)
def test_label_before_a_value_and_a_corrected_box_are_no_answer(
    completion: str, answer: str, reward: float
) -> None:
    assert call(math, completion, answer) == reward


WRITTEN = [
    ("\\boxed{3}? No.", "3", 0.0),
    ("\\boxed{3}? Yes.", "3", 1.0),
    ("The answer is 3. Actually, it is 4.", "3", 0.0),
    ("The answer is 3. Actually, it is 4.", "4", 1.0),
    ("\\boxed{\\textbf{(B)}\\ 5}", "5", 1.0),
    ("\\boxed{12 percent}", "12\\%", 1.0),
    ("\\boxed{12\\text{ percent}}", "12\\%", 1.0),
    ("\\boxed{\u221a2}", "\\sqrt{2}", 1.0),
    ("\\boxed{2\u221a3}", "2\\sqrt{3}", 1.0),
    ("\\boxed{2\u221a(3+1)}", "4", 1.0),
    ("\\boxed{1\u20442}", "\\frac12", 1.0),
    ("\\boxed{\u2153}", "\\frac13", 1.0),
    ("\\boxed{2\u2153}", "\\frac73", 1.0),
    ("\\boxed{x\u2074}", "x^4", 1.0),
    ("\\boxed{10\u207b\xb3}", "0.001", 1.0),
    ("\\boxed{2516\u2088}", "2516_8", 1.0),
    ("\\boxed{2516_{\\text{base }8}}", "2516_8", 1.0),
    ("\\boxed{5\\,\\Omega}", "5", 1.0),
    ("\\boxed{5 \u03a9}", "5", 1.0),
    ("\\boxed{\\text{The answer is } 5}", "5", 1.0),
    ("\\boxed{k\\pi, k\\in\\mathbb{Z}}", "k\\pi", 1.0),
    ("\\boxed{k\\pi, k\\in\\mathbb{Z}}", "2k\\pi", 0.0),
    ("\\boxed{x\\ge 1\\text{, with }x>0}", "x\\ge 1", 1.0),
    ("Answer: 42 apples (6 * 7)", "42", 1.0),
    ("Answer: 42 apples (6 * 7)", "7", 0.0),
    ("The answer is $\\frac12$, or 50%", "1/2", 1.0),
    ("The answer is $\\frac12$, or 40%", "1/2", 0.0),
    ("\\boxed{3}. Hmm, not 3. So \\boxed{4}", "4", 1.0),
    ("The answer is 3. Wait, let me check: 1+2 = 3. Yes.", "3", 1.0),
    ("x\\in(0,1)", "(0,1)", 1.0),
    ("The answer is sin (2x)", "\\sin(2x)", 1.0),
    ("The answer is 5!. Actually 5! is 120.", "120", 1.0),
    ("The answer is sqrt (5)", "\\sqrt5", 1.0),
    ("The answer is 3. No other number works.", "3", 1.0),
    ("Answer: x = 2 or 2.0", "2", 1.0),
    ("Answer: 2 or 3", "2", 0.0),
    ("\\boxed{5 m\xb2}", "5", 1.0),
    ("\\boxed{\\text{The answer is not } 5}", "5", 0.0),
    ("\\boxed{\xbd}", "0.5", 1.0),
    ("The answer is 2\xbd", "5/2", 1.0),
]


@pytest.mark.parametrize(("completion", "answer", "reward"), WRITTEN)
def test_answers_are_read_as_people_and_models_write_them(
    completion: str, answer: str, reward: float
) -> None:
    assert call(math, completion, answer) == reward
