"""Rewards for mathematics with a final answer."""

from __future__ import annotations

import re
from typing import Any, Literal

from relax_events.api.rewards import reward
from relax_events.packages.verifiers.answer_extraction import (
    THOUGHT_END,
    bracketed_answer,
    final_text,
    last_box,
    last_boxes,
    references,
    short_answer,
    tagged_answer,
)
from relax_events.packages.verifiers.math_equality import are_equal, normalize, warm_up
from relax_events.packages.verifiers.math_extraction import (
    MathFinding,
    find_answer,
    find_boxed,
    reference_text,
)

PACKAGES = ("math-verify", "latex2sympy2-extended", "sympy")
RESPONSE_MARK = "### Response"
TAIL_CHARACTERS = 300
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
DOLLARS = re.compile(r"\$([^$]+)\$")
STATED = re.compile(
    r"(?:final answer|answer)\s*(?:is|:|=)\s*([^\n]+?)\s*(?:\.\s|\.?$)",
    re.IGNORECASE | re.MULTILINE,
)
INLINE_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
UNITS = re.compile(
    r"\\%|%|\\?\$|\b(?:degrees?|units?|dollars?|cents?|cm|meters?|feet|inches|hours?|minutes?|seconds?|points?)\b"
)
THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
Boxes = Literal["joined", "last"]
"""Which boxes are the answer: the last one with those joined to it, or the last one alone."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMS = {
    "think_answer": THINK_THEN_ANSWER,
    "think": re.compile(r"\s*<think>.*?</think>\s*\S.*", re.DOTALL),
    "answer": re.compile(r".*?<answer>.*?</answer>.*", re.DOTALL),
}
Form = Literal["think_answer", "think", "answer"]


def find_math(
    completion: str, *, answer: str, box_only: bool = False, boxes: Boxes = "joined", **_: Any
) -> MathFinding:
    """Compare the final answer after the reasoning."""
    text = final_text(completion)
    return (find_boxed if box_only else find_answer)(text, answer, last_alone=boxes == "last")


def find_after_reasoning(
    completion: str, *, answer: str, boxes: Boxes = "last", **_: Any
) -> MathFinding:
    """Compare the last box after the mark that ends the reasoning."""
    references(answer)
    for mark in (THOUGHT_END, RESPONSE_MARK, RESPONSE_MARK.replace(" ", "")):
        separator, text = completion.rpartition(mark)[1:]
        if separator:
            return find_boxed(text, answer, last_alone=boxes == "last")
    return MathFinding(
        answer=None,
        location="no answer",
        why=f"the reasoning has no end, {THOUGHT_END} or {RESPONSE_MARK}",
        is_right=False,
    )


def find_last_box(completion: str, *, answer: str, boxes: Boxes = "last", **_: Any) -> MathFinding:
    """Compare the last box of the completion."""
    return find_boxed(completion, answer, last_alone=boxes == "last")


def find_answer_line(completion: str, *, answer: str, **_: Any) -> MathFinding:
    """Compare the last line "Answer:" as text."""
    lines = ANSWER_LINE.findall(completion[-TAIL_CHARACTERS:])
    line_answer, reference_answers = (
        _normalize_dapo(lines[-1]) if lines else None,
        [_normalize_dapo(one) for one in references(answer)],
    )
    if line_answer is None:
        return MathFinding(
            answer=None,
            location="no answer",
            why=f"no line 'Answer:' in the last {TAIL_CHARACTERS} characters",
            is_right=False,
        )
    is_right = line_answer in reference_answers
    references_text = " or ".join(repr(one) for one in reference_answers)
    why = f"it {'is' if is_right else 'is not'} {references_text:.200}"
    return MathFinding(
        answer=line_answer, location="the last line 'Answer:'", why=why, is_right=is_right
    )


@reward(
    source="math-verify's rules of equality, github.com/huggingface/math-verify",
    packages=PACKAGES,
    prepare=warm_up,
    explain=find_math,
)
def math(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    box_only: bool = False,
    boxes: Boxes = "joined",
) -> float:
    r"""Give 1 when the final answer equals a reference in mathematics, else 0.

    The final answer is the last box, with the boxes that "and", "or", a comma or a semicolon joins
    to it, or the later sentence "The final answer is ... I hope it is correct". A text without
    either is the answer itself, or has as answer the clause after "answer is" or "answer:" in the
    last 1,000 characters, else the last formula or number there. A formula counts whole, never a
    part of it. What is denied, doubted or one of several chooses nothing, and a box with a
    placeholder is no answer. The references are one text or a JSON
    list of texts, boxed or not, in LaTeX or in the syntax of programs (`2*pi`, `x**2`, `1e4`). All
    boxes of a reference are required, in any order. With `box_only` an answer outside of
    a box does not count. With `boxes = "last"` the last box alone is the answer, as it is for
    verl's reward of the same data; then a completion that boxes two solutions one by one is wrong.

    A number is read with its sign, whole part, fraction, base and unit: `2 2/3` is 8/3, `4 10/3` is
    no number, and `2516_8` equals neither 2516 nor `2516_9`. Exact values are compared exactly,
    decimals to six digits relative to their size. Units of length, mass, time and money are
    converted; other words behind a number, and a qualifier such as "for all real x", are no part of
    its value. Other rules of equality are math-verify's: `50\%` equals 50, `32, 349` is two numbers
    and `32,349` is one, and sets have no order.

    Raises:
        RewardError: The answer is too long, too deeply nested, or holds a number too large to be
            worked out.
        ValueError: The sample has no reference answer, or one with several answers in boxes far
            from each other.
    """
    return find_math(completion, answer=answer, box_only=box_only, boxes=boxes).reward


@reward(
    source="DeepScaleR's reward, github.com/rllm-org/rllm",
    packages=PACKAGES,
    prepare=warm_up,
    explain=find_after_reasoning,
)
def deepscaler(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    boxes: Boxes = "last",
) -> float:
    r"""Give 1 when the last box after `</think>` (or `### Response`) equals a reference in
    mathematics, else 0.

    Without such a mark the reasoning has not ended, and the reward is 0. `boxes` is as in `math`;
    rllm's reward reads the last box alone.

    Raises:
        ValueError: The sample has no reference answer.
    """
    return find_after_reasoning(completion, answer=answer, boxes=boxes).reward


@reward(
    source="DAPO (arXiv 2503.14476), section 2.4 and its data's answer format",
    explain=find_answer_line,
)
def dapo_math(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    wrong_reward: float = -1.0,
) -> dict[str, float]:
    """Give 1 for the reference answer behind the last "Answer:" of the last 300 characters, else
    `wrong_reward`.

    Both are compared as text, without units and LaTeX's marks. Of several words the text in a box
    or between dollar signs counts: the data's answers are integers. The component `accuracy` is 1
    or 0.

    Raises:
        ValueError: The sample has no reference answer.
    """
    is_right = find_answer_line(completion, answer=answer).is_right
    return {"reward": 1.0 if is_right else wrong_reward, "accuracy": float(is_right)}


@reward(
    source="Geometry3K with EasyR1's reward, github.com/hiyouga/EasyR1",
    packages=PACKAGES,
    prepare=warm_up,
    explain=find_last_box,
)
def geo3k(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    format_weight: float = 0.1,
    boxes: Boxes = "last",
) -> dict[str, float]:
    r"""Give 0.9 for the right last box and 0.1 for the form `<think>...</think> ... \boxed{}`.

    The components are `accuracy` and `format`, each 1 or 0. `boxes` is as in `math`; EasyR1's
    reward reads the last box alone.

    Raises:
        ValueError: The sample has no reference answer.
    """
    accuracy = find_last_box(completion, answer=answer, boxes=boxes).reward
    form = float(_thinks_then_boxes(completion))
    return {
        "reward": (1.0 - format_weight) * accuracy + format_weight * form,
        "accuracy": accuracy,
        "format": form,
    }


@reward(
    source=(
        "open-r1-multimodal's rewards, github.com/EvolvingLMMs-Lab/open-r1-multimodal; forms of "
        "DeepSeek-R1 (arXiv 2501.12948, section 2.2.2) and TRL's think_format_reward, tags as "
        "open-r1 counts them"
    ),
    packages=PACKAGES,
    prepare=warm_up,
)
def openr1_multimodal(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    boxes: Boxes = "joined",
    form: Form = "think_answer",
    opened: bool = False,
    within: Literal["tag", "brackets"] = "tag",
) -> dict[str, float]:
    """Give 1 for the right content of `<answer>` and 1 for the form
    `<think>...</think><answer>...</answer>`.

    An answer is right when it equals the reference in mathematics or as text; `boxes` is as in
    `math`. With `within = "brackets"` it is the last `[...]` or `[[...]]` behind the thought; a
    denied one, and one behind "or", is none. A tag that occurs twice makes both 0: one cannot
    answer twice.

    `form` may also be `think`, a thought with a text behind it, or `answer`, `<answer>` and
    `</answer>` anywhere. With `opened` the prompt's template has begun the thought already.

    The components are `accuracy`, `format` and `tags`, the share of the form's tags that occur
    once. Their weights are 1, 1 and 0; `reward.weights` weighs them otherwise.

    Raises:
        ValueError: The sample has no reference answer.
    """
    reference_answers = [tagged_answer(one) or one for one in references(answer)]
    text = f"{TAGS[0]}{completion}" if opened else completion
    tags = [tag for tag in TAGS if tag in FORMS[form].pattern]
    share = sum(text.count(tag) == 1 for tag in tags) / len(tags)
    if any(text.count(tag) > 1 for tag in TAGS):
        return {"reward": 0.0, "accuracy": 0.0, "format": 0.0, "tags": share}
    part = tagged_answer(completion) if within == "tag" else bracketed_answer(final_text(text))
    is_right = part is not None and any(
        _equals(part, one, last_alone=boxes == "last") for one in reference_answers
    )
    accuracy, has_form = float(is_right), float(FORMS[form].fullmatch(text) is not None)
    return {"reward": accuracy + has_form, "accuracy": accuracy, "format": has_form, "tags": share}


def _equals(answer: str, reference: str, *, last_alone: bool) -> bool:
    if answer.casefold() == reference.casefold():
        return True
    boxes = last_boxes(answer)
    text = ", ".join(boxes[-1:] if last_alone else boxes) if boxes else short_answer(answer)
    return are_equal(text, reference_text(reference))


def _thinks_then_boxes(text: str) -> bool:
    opened, _, after = text.partition(THOUGHT_END)
    return opened.lstrip().startswith("<think>") and "}" in after.partition(r"\boxed{")[2]


def _normalize_dapo(text: str) -> str:
    """Return an answer as DAPO compares it: the value alone."""
    box, formula = last_box(text), DOLLARS.search(text)
    answer = box if box is not None else formula[1] if formula else text
    value = normalize(UNITS.sub("", answer)).rpartition("=")[2].strip("*_")
    return value.replace(",", "") if value.replace(",", "").lstrip("-").isdigit() else value
