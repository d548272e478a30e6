"""Rewards that compare a completion with the reference answer as text or as a number."""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal
from typing import Any

from relax_events.rewards.declaration import Explanation, reward
from relax_events.rewards.verifiers.answer_extraction import final_text, references, tagged_answer

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FINAL_ANSWER_MARK = "####"
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
SQUAD = (
    "SQuAD: 100,000+ Questions for Machine Comprehension of Text (arXiv 1606.05250), section 6.1"
)


def exact_match(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give 1 for the reference answer, surrounding white space aside, else 0."""
    return float(completion.strip() == answer.strip())


def explain_gsm8k(completion: str, *, answer: str, **_: Any) -> Explanation:
    """Explain which number was compared."""
    wanted, given = final_number(answer), final_number(completion)
    place = f"behind {FINAL_ANSWER_MARK}" if FINAL_ANSWER_MARK in completion else "the last number"
    return Explanation(
        answer=None if given is None else str(given),
        location="no number" if given is None else place,
        why="the reference answer has no number"
        if wanted is None
        else f"it {'is' if given == wanted else 'is not'} {wanted}",
    )


@reward(
    source=(
        "Training Verifiers to Solve Math Word Problems (arXiv 2110.14168): final answers after "
        "####"
    ),
    explain=explain_gsm8k,
)
def gsm8k(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give 1 for the right final number, else 0.

    The final number stands after `####`, and where there is none it is the last number of the text;
    `1,000.0` equals `1000`.
    """
    wanted, given = final_number(answer), final_number(completion)
    return float(wanted is not None and wanted == given)


@reward(source=SQUAD)
def squad_exact_match(
    completion: str, *, answer: str, metadata: dict[str, Any], prompt: str
) -> float:
    """Give 1 when the answer equals a reference but for case, punctuation, articles and white
    space, else 0.

    The answer is what follows `</think>`, and the content of `<answer>` where there is such a tag.
    The references are one text or a JSON list of some.
    """
    given = squad_words(_extract_answer(completion))
    return float(any(given == squad_words(wanted) for wanted in references(answer)))


@reward(source=SQUAD)
def f1(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give the F1 of the words that the answer shares with the reference, of several the highest.

    Words and answer are as in `squad_exact_match`.
    """
    given = squad_words(_extract_answer(completion))
    return max(_word_f1(given, squad_words(wanted)) for wanted in references(answer))


def final_number(text: str) -> Decimal | None:
    """Find the first number after the last `####`, or else the last number."""
    _, mark, tail = text.rpartition(FINAL_ANSWER_MARK)
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal((numbers[0] if mark else numbers[-1]).replace(",", ""))


def squad_words(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them: lower case, no punctuation, no
    articles.
    """
    return ARTICLE.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


def _extract_answer(completion: str) -> str:
    text = final_text(completion)
    tagged = tagged_answer(text)
    return text if tagged is None else tagged


def _word_f1(given: list[str], wanted: list[str]) -> float:
    num_shared = (Counter(given) & Counter(wanted)).total()
    if not num_shared:
        return 0.0
    return 2 * num_shared / (len(given) + len(wanted))
