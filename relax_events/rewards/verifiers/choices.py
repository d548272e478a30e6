"""Rewards for questions with a few answers to choose from."""

from __future__ import annotations

import re
from typing import Any

from relax_events.rewards.declaring import declares
from relax_events.rewards.verifiers.answers import final_text, references, tagged_answer
from relax_events.rewards.verifiers.text_match import squad_words

LETTER_FORMS = (
    re.compile(r"\\boxed\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\{)?\s*\(?([A-Z])\)?\s*\}"),
    re.compile(r"<answer>\s*\(?([A-Z])\b", re.IGNORECASE),
    re.compile(r"\b(?i:answer|choice|option)\b\W*(?:is\b\W*)?(?i:choice\b|option\b)?\W{0,4}([A-J])\b(?!['-])"),
    re.compile(r"^\W*([A-J])(?:[).:]|\W*$)", re.MULTILINE),
)
"""From the plainest statement to the weakest; the last match of the first form that occurs counts."""
LABEL_EDGES = "()[]{}.:,*\"' \t\n"


@declares(
    source="GPQA: A Graduate-Level Google-Proof Q&A Benchmark (arXiv 2311.12022)",
    metadata={
        "correct_letter": "the right letter; without it the reference answer must be one",
        "choices": "texts of the choices, A first; may be left out",
    },
)
def gpqa(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    r"""Give 1 for the right letter after `</think>`, else 0.

    The letter stands in a box, in an `<answer>` tag, behind "answer" or "option", or begins a line. Where there is none, the one
    choice whose text occurs in the answer counts.

    Raises:
        ValueError: Neither metadata nor the reference answer say which letter is right.
    """
    choices = [str(choice) for choice in metadata.get("choices") or []]
    wanted = str(metadata.get("correct_letter") or _letter_of(answer, choices)).strip(LABEL_EDGES).upper()
    if not re.fullmatch("[A-Z]", wanted):
        raise ValueError(f"the right letter must be one of A to Z, got {wanted!r:.40}; see metadata.correct_letter and data.answer_key")
    text = final_text(completion)
    return float((chosen_letter(text) or _only_choice_in(text, choices)) == wanted)


@declares(source="Answers inside of <answer> tags, as R1-style prompts ask for them")
def multiple_choice(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give 1 when the last `<answer>` tag holds the reference answer, else 0; case, brackets and a full stop don't count.

    Raises:
        ValueError: The sample has no reference answer.
    """
    tagged = [(one, tagged_answer(one)) for one in references(answer)]
    wanted = [_label(one if inside is None else inside) for one, inside in tagged]
    if not all(wanted):
        raise ValueError(f"the reference answer {answer!r:.40} holds no label; see data.answer_key")
    given = tagged_answer(completion)
    return float(given is not None and _label(given) in wanted)


def chosen_letter(text: str) -> str | None:
    """Return the letter that a text decides for, or None."""
    for form in LETTER_FORMS:
        if found := form.findall(text):
            return str(found[-1]).upper()
    return None


def _label(text: str) -> str:
    return text.strip(LABEL_EDGES).casefold()


def _letter_of(answer: str, choices: list[str]) -> str:
    """Return the letter that a reference answer is, or the letter of the choice that it repeats."""
    words = squad_words(answer)
    return next((_letter(index) for index, choice in enumerate(choices) if squad_words(choice) == words), answer)


def _only_choice_in(text: str, choices: list[str]) -> str | None:
    spaced = f" {' '.join(squad_words(text))} "
    found = [_letter(index) for index, choice in enumerate(choices) if f" {' '.join(squad_words(choice))} " in spaced]
    return found[0] if len(found) == 1 else None


def _letter(index: int) -> str:
    return chr(ord("A") + index)
