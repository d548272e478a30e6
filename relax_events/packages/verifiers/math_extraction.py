"""Extract the final mathematical answer of a completion, and compare it with the references."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_events.api.rewards import Explanation
from relax_events.packages.verifiers.answer_extraction import (
    BOX,
    last_boxes,
    reference_boxes,
    references,
)
from relax_events.packages.verifiers.math_equality import (
    are_equal,
    check_comparable,
    check_size,
    equals_parsed,
    import_math_verify,
    normalize,
    plain_number,
    to_math_verify_latex,
)
from relax_events.packages.verifiers.text_answers import FINAL_ANSWER_MARK

TAIL_CHARACTERS = 1000
MAX_CLAUSE_CHARACTERS = 100
STATED = re.compile(r"answer(?:\s+is\b|\W{0,4}[:=])(?:\s*is\b)?[\s:=*]*", re.IGNORECASE)
CLOSING = re.compile(r"final answer is\b[^\n]{1,200}?I hope", re.IGNORECASE)
"""Minerva's prompts request this sentence; its answer counts like a box, at any position."""
CLAUSE_END = re.compile(r"\.(?:\s|$)")
CLAUSE_EDGES = "*_` \t"


@dataclass(frozen=True, slots=True, kw_only=True)
class MathFinding(Explanation):
    """An answer in mathematics, and whether it is right."""

    is_right: bool

    @property
    def reward(self) -> float:
        """1 for the right answer, else 0."""
        return float(self.is_right)


def find_answer(text: str, answer: str, *, last_alone: bool = False) -> MathFinding:
    """Compare the final answer of a text with the reference answers: its last box or closing
    sentence, else its last stated answer.

    Raises:
        RewardError: The answer can't be compared.
    """
    closing = None
    for closing in CLOSING.finditer(text):  # noqa: B007 the last one counts
        pass
    if closing is not None and BOX.search(text, closing.start()) is None:
        stated = find_stated(closing[0], answer)
        if stated.answer is not None:
            return stated
    boxed = find_boxed(text, answer, last_alone=last_alone)
    return find_stated(text, answer) if boxed.answer is None else boxed


def find_boxed(text: str, answer: str, *, last_alone: bool = False) -> MathFinding:
    """Compare the last box of a text, with the boxes joined to it unless `last_alone`, with the
    reference answers.

    Raises:
        RewardError: The answer can't be compared.
    """
    reference_texts = [reference_text(one) for one in references(answer)]
    if not (boxes := last_boxes(text)):
        return MathFinding(answer=None, location="no box", why="nothing is boxed", is_right=False)
    boxes = boxes[-1:] if last_alone else boxes
    boxed_answer = ", ".join(boxes)
    return _build_finding(
        boxed_answer,
        any(are_equal(boxed_answer, one) for one in reference_texts),
        "the last box" if len(boxes) == 1 else "the last boxes",
        reference_texts,
    )


def find_stated(text: str, answer: str) -> MathFinding:
    """Compare the last stated answer of a text without boxes with the reference answers: the text
    after "answer is", else the last formula or number.

    Raises:
        RewardError: The answer can't be compared.
    """
    reference_texts = [reference_text(one) for one in references(answer)]
    tail = _tail(text)
    clause = _stated_clause(tail)
    if clause is not None and (
        plain_number(normalize(clause)) is not None
        or any(normalize(clause) == normalize(one) for one in reference_texts)
    ):
        return _build_finding(
            clause,
            any(are_equal(clause, one) for one in reference_texts),
            "behind 'answer'",
            reference_texts,
        )
    parsed = _extract(tail)
    if parsed and any(equals_parsed(parsed, one) for one in reference_texts):
        return _build_finding(_get_text(parsed), True, "found by math-verify", reference_texts)
    if clause is not None and len(clause) <= MAX_CLAUSE_CHARACTERS:
        return _build_finding(
            clause,
            any(are_equal(clause, one) for one in reference_texts),
            "behind 'answer'",
            reference_texts,
        )
    if parsed:
        return _build_finding(_get_text(parsed), False, "found by math-verify", reference_texts)
    return MathFinding(
        answer=None,
        location="no answer",
        why=f"the last {TAIL_CHARACTERS} characters state none",
        is_right=False,
    )


def reference_text(reference: str) -> str:
    """Return the answer of a reference: all its boxes, or the text after `####`, or the whole
    text.
    """
    boxes = reference_boxes(reference)
    return ", ".join(boxes) if boxes else reference.rpartition(FINAL_ANSWER_MARK)[2].strip()


def _tail(text: str) -> str:
    """Return the end of a text from the start of a line, so that no formula is cut."""
    tail = text[-TAIL_CHARACTERS:]
    if len(text) <= TAIL_CHARACTERS:
        return tail
    _, line_end, whole_lines = tail.partition("\n")
    return whole_lines if line_end and whole_lines.strip() else tail


def _stated_clause(tail: str) -> str | None:
    marks = list(STATED.finditer(tail))
    clause = (
        CLAUSE_END.split(tail[marks[-1].end() :].partition("\n")[0])[0].strip(CLAUSE_EDGES)
        if marks
        else ""
    )
    return clause or None


def _extract(tail: str) -> tuple[Any, ...]:
    """Return the result of math-verify: an expression and its text, or only the text if it can't be
    parsed.
    """
    package = import_math_verify()
    config = (
        package.LatexExtractionConfig(boxed_match_priority=-1),
        package.ExprExtractionConfig(),
    )
    parsed = package.parse(
        to_math_verify_latex(tail), config, parsing_timeout=None, raise_on_error=True
    )
    for text in parsed:
        if isinstance(text, str):
            check_comparable(text)
    return check_size(parsed)


def _get_text(parsed: Sequence[Any]) -> str:
    return str(parsed[-1])


def _build_finding(
    answer: str, is_right: bool, location: str, reference_texts: Sequence[str]
) -> MathFinding:
    references_text = " or ".join(repr(one) for one in reference_texts)
    why = f"it {'equals' if is_right else 'does not equal'} {references_text:.200}"
    return MathFinding(answer=answer, location=location, why=why, is_right=is_right)
