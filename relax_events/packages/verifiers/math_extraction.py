"""Extract the final mathematical answer of a completion, and compare it with the references."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from relax_events.api.rewards import Explanation
from relax_events.packages.verifiers.answer_extraction import (
    BOX,
    last_boxes,
    reference_boxes,
    references,
)
from relax_events.packages.verifiers.math_equality import are_equal, normalize
from relax_events.packages.verifiers.math_numbers import unify_characters, write_latex
from relax_events.packages.verifiers.math_prose import (
    HEDGE,
    clause_values,
    find_runs,
    is_formula,
    is_retracted,
    split_sentences,
    stated_clauses,
    strip_edges,
)
from relax_events.packages.verifiers.text_answers import FINAL_ANSWER_MARK

TAIL_CHARACTERS = 1000
MAX_TEXT_CHARACTERS = 2000
MAX_WHOLE_CHARACTERS = 200
NEGATIVE = re.compile(r"\b(?:negative|minus)\s+(?=\$?[\d\\])", re.IGNORECASE)
OR = re.compile(r",?\s+or\s+")
CLOSING = re.compile(r"final answer is\b[^\n]{1,200}?I hope", re.IGNORECASE)
"""Minerva's prompts request this sentence; its answer counts like a box, at any position."""


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
    """Compare the stated answer of a text without boxes with the reference answers: the whole
    text, or the clause after "answer is", or else the last formula or number.

    A hedge, a denial and a list choose nothing, and a part of a formula is no answer.

    Raises:
        RewardError: The answer can't be compared.
    """
    reference_texts = [reference_text(one) for one in references(answer)]
    text = write_latex(unify_characters(text[-MAX_TEXT_CHARACTERS:])).replace('\\"', '"')
    text = NEGATIVE.sub("-", text)
    tail = _tail(text)
    if len(text) <= MAX_WHOLE_CHARACTERS and _is_whole_answer(text, reference_texts):
        return _compare([strip_edges(text)], "the whole text", reference_texts)
    clauses = [] if is_retracted(tail) else list(stated_clauses(tail))
    for clause, is_open in clauses:
        if not is_open or _is_doubtful_reference(clause, reference_texts):
            return _compare(list(clause_values(clause)), "behind 'answer'", reference_texts)
    if clauses:
        return _find_nothing("the stated answer is denied or left open")
    for sentence in reversed(split_sentences(tail)):
        if not (runs := find_runs(sentence)):
            continue
        if runs[-1].is_open:
            return _find_nothing("the last formula or number is denied or left open")
        return _compare(runs[-1].values, "the last formula or number", reference_texts)
    return _find_nothing(f"the last {TAIL_CHARACTERS} characters state none")


def _is_whole_answer(text: str, reference_texts: Sequence[str]) -> bool:
    """Return whether a text is nothing but an answer: one formula or number, or a reference."""
    if any(normalize(text) == normalize(one) for one in reference_texts):
        return True
    return is_formula(text)


def _is_doubtful_reference(clause: str, reference_texts: Sequence[str]) -> bool:
    """Return whether a reference answer itself denies or leaves open, such as "not prime"."""
    return HEDGE.search(clause) is not None and any(
        normalize(clause) == normalize(one) for one in reference_texts
    )


def _find_nothing(why: str) -> MathFinding:
    return MathFinding(answer=None, location="no answer", why=why, is_right=False)


def _compare(values: Sequence[str], location: str, reference_texts: Sequence[str]) -> MathFinding:
    for value in dict.fromkeys(values):
        if not BOX.search(value) and any(_equals(value, one) for one in reference_texts):
            return _build_finding(value, True, location, reference_texts)
    return _build_finding(values[0], False, location, reference_texts)


def _equals(value: str, reference: str) -> bool:
    """Return whether a value equals a reference, or each form that "or" names does."""
    if are_equal(value, reference):
        return True
    forms = OR.split(value)
    return len(forms) > 1 and all(are_equal(form, reference) for form in forms)


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


def _build_finding(
    answer: str, is_right: bool, location: str, reference_texts: Sequence[str]
) -> MathFinding:
    references_text = " or ".join(repr(one) for one in reference_texts)
    why = f"it {'equals' if is_right else 'does not equal'} {references_text:.200}"
    return MathFinding(answer=answer, location=location, why=why, is_right=is_right)
