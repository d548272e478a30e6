"""Rewards for mathematics with a final answer."""

from __future__ import annotations

import re
from typing import Any

from relax_events.rewards.declaring import declares
from relax_events.rewards.verifiers.answers import THOUGHT_END, final_text, last_box, references, short_answer, tagged_answer
from relax_events.rewards.verifiers.math_equality import are_equal, tidy, warm_up
from relax_events.rewards.verifiers.text_match import FINAL_ANSWER_MARK

PACKAGES = ("math-verify", "latex2sympy2-extended", "sympy")
RESPONSE_MARK = "### Response"
TAIL_CHARACTERS = 300
ANSWER_LINE = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)
STATED = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*([^\n]+?)\s*(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
INLINE_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
UNITS = re.compile(r"\\%|%|\\?\$|\b(?:degrees?|units?|dollars?|cents?|cm|meters?|feet|inches|hours?|minutes?|seconds?|points?)\b")
THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
THINK_THEN_BOX = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@declares(source="math-verify's rules of equality, github.com/huggingface/math-verify", packages=PACKAGES, prepare=warm_up)
def math(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str, box_only: bool = False) -> float:
    r"""Give 1 when the final answer equals a reference in mathematics, else 0.

    The final answer is the last box; where there is none, what follows "answer is", the last formula, or the last number of the
    last 300 characters. The references are one text or a JSON list of some, boxed or not.
    With `box_only` an answer outside of a box does not count.
    """
    text = final_text(completion)
    given = last_box(text)
    if given is None and not box_only:
        given = _stated_answer(text[-TAIL_CHARACTERS:])
    return _matches(given, answer)


@declares(source="DeepScaleR's reward, github.com/rllm-org/rllm", packages=PACKAGES, prepare=warm_up)
def deepscaler(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    r"""Give 1 when the last box after `</think>` (or `### Response`) equals a reference in mathematics, else 0.

    Without such a mark the reasoning has not ended, and the reward is 0.
    """
    for mark in (THOUGHT_END, RESPONSE_MARK, RESPONSE_MARK.replace(" ", "")):
        _, found, text = completion.rpartition(mark)
        if found:
            return _matches(last_box(text), answer)
    return 0.0


@declares(source="DAPO (arXiv 2503.14476), section 2.4 and its data's answer format")
def dapo_math(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str, wrong_reward: float = -1.0) -> dict[str, float]:
    """Give 1 for the reference answer behind the last "Answer:" of the last 300 characters, else `wrong_reward`.

    Both are compared as text, without units and LaTeX's marks: the data's answers are integers. The component `accuracy` is 1 or 0.
    """
    lines = ANSWER_LINE.findall(completion[-TAIL_CHARACTERS:])
    given = _bare(lines[-1]) if lines else ""
    is_right = any(given == _bare(wanted) for wanted in references(answer))
    return {"reward": 1.0 if is_right else wrong_reward, "accuracy": float(is_right)}


@declares(source="Geometry3K with EasyR1's reward, github.com/hiyouga/EasyR1", packages=PACKAGES, prepare=warm_up)
def geo3k(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str, format_weight: float = 0.1) -> dict[str, float]:
    r"""Give 0.9 for the right last box and 0.1 for the form `<think>...</think> ... \boxed{}`.

    The components are `accuracy` and `format`, each 1 or 0.
    """
    accuracy = _matches(last_box(completion), answer)
    form = float(THINK_THEN_BOX.fullmatch(completion) is not None)
    return {"reward": (1.0 - format_weight) * accuracy + format_weight * form, "accuracy": accuracy, "format": form}


@declares(source="open-r1-multimodal's rewards, github.com/EvolvingLMMs-Lab/open-r1-multimodal", packages=PACKAGES, prepare=warm_up)
def openr1_multimodal(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> dict[str, float]:
    """Give 1 for the right content of `<answer>` and 1 for the form `<think>...</think><answer>...</answer>`.

    The components are `accuracy` and `format`; `reward.weights` weighs them otherwise. An answer is right when it equals the
    reference in mathematics or as text. A tag that occurs twice makes both 0: one cannot answer twice.
    """
    if any(completion.count(tag) > 1 for tag in TAGS):
        return {"accuracy": 0.0, "format": 0.0}
    given = tagged_answer(completion)
    wanted = [tagged_answer(one) or one for one in references(answer)]
    accuracy = given is not None and any(_equals(given, one) for one in wanted)
    return {"accuracy": float(accuracy), "format": float(THINK_THEN_ANSWER.fullmatch(completion) is not None)}


def _matches(given: str | None, answer: str) -> float:
    wanted = [_reference(one) for one in references(answer)]
    return float(given is not None and any(are_equal(given, one) for one in wanted))


def _reference(text: str) -> str:
    box = last_box(text)
    return text.rpartition(FINAL_ANSWER_MARK)[2].strip() if box is None else box


def _equals(given: str, wanted: str) -> bool:
    if given.casefold() == wanted.casefold():
        return True
    box = last_box(given)
    return are_equal(short_answer(given) if box is None else box, _reference(wanted))


def _stated_answer(text: str) -> str | None:
    for form in (STATED, INLINE_MATH, LAST_NUMBER):
        if found := form.findall(text):
            last = found[-1] if isinstance(found[-1], str) else next(filter(None, found[-1]), "")
            return last.strip()
    return None


def _bare(text: str) -> str:
    """Return an answer as DAPO compares it: the value alone."""
    box = last_box(text)
    value = tidy(UNITS.sub("", text if box is None else box)).rpartition("=")[2]
    return value.replace(",", "") if value.replace(",", "").lstrip("-").isdigit() else value
