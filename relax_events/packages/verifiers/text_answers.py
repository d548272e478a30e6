"""Rewards that compare a completion with the reference answer as text, as a number or as the letter
of a choice.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from fractions import Fraction
from typing import Any

from relax_events.api.rewards import Explanation, reward
from relax_events.packages.verifiers.answer_extraction import (
    ANSWER_TAG,
    ANSWER_TAG_END,
    final_text,
    references,
    tagged_answer,
)
from relax_events.packages.verifiers.choice_grammar import read_choice
from relax_events.packages.verifiers.choice_words import CALLS_WRONG, OR, WORDS, Role
from relax_events.packages.verifiers.math_numbers import find_numbers

FINAL_ANSWER_MARK = "####"
OPEN_NUMBER = re.compile(
    r"(?:\b(?:or|not|nor)|n't|\u6216|\u6216\u8005|\u8fd8\u662f|\u4e0d\u662f|\u5e76\u975e)\W*$",
    re.IGNORECASE,
)
"""Words before a number that deny it, or leave open which of two is the answer."""
CONTINUED = re.compile(
    r"[ \t]*(?:[-+*/^,]|\\(?:times|cdot|div)|(?:or|x)\b|\u6216\u8005?|\u8fd8\u662f)[ \t]*[$(]?\d",
    re.IGNORECASE,
)
"""What stands behind a number that is part of an expression, a range or a list."""
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
SQUAD = (
    "SQuAD: 100,000+ Questions for Machine Comprehension of Text (arXiv 1606.05250), section 6.1"
)


def exact_match(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give 1 for the reference answer, surrounding white space aside, else 0.

    Raises:
        ValueError: The sample has no reference answer.
    """
    if not answer.strip():
        raise ValueError("the sample has no reference answer; see data.answer_key")
    return float(completion.strip() == answer.strip())


def explain_gsm8k(completion: str, *, answer: str, **_: Any) -> Explanation:
    """Explain which number was compared."""
    reference_numbers, number = _reference_numbers(answer), final_number(completion)
    matched_part = (
        f"behind {FINAL_ANSWER_MARK}" if FINAL_ANSWER_MARK in completion else "the last number"
    )
    return Explanation(
        answer=None if number is None else str(number),
        location="no number" if number is None else matched_part,
        why=f"it {'is' if number in reference_numbers else 'is not'} "
        + " or ".join(map(str, reference_numbers)),
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

    The final number stands after `####`; without `####` it is the last number of the text, unless
    "or" or "not" stands before it. After `####` a part of an expression, such as `5*2` or `5 or 6`,
    is no number; of `12 - 7 = 5` it is the 5. `1,000.0` equals `1000`, and a fraction is one
    number. Any minus sign counts that follows no number, letter or closing bracket: `10-5` ends
    with 5.

    Raises:
        ValueError: The sample has no reference answer, or one without a number.
    """
    return float(final_number(completion) in _reference_numbers(answer))


@reward(source=SQUAD)
def squad_exact_match(
    completion: str, *, answer: str, metadata: dict[str, Any], prompt: str
) -> float:
    """Give 1 when the answer equals a reference but for case, punctuation, articles and white
    space, else 0.

    The answer is the text after `</think>`, or the content of its `<answer>` tag. The references
    are one text or a JSON list of texts.

    Raises:
        ValueError: The sample has no reference answer.
    """
    answer_words = squad_words(_extract_answer(completion))
    return float(any(answer_words == squad_words(reference) for reference in references(answer)))


@reward(source=SQUAD)
def f1(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give the F1 of the words that the answer shares with the reference, of several the highest.

    Words and answer are as in `squad_exact_match`.

    Raises:
        ValueError: The sample has no reference answer.
    """
    answer_words = squad_words(_extract_answer(completion))
    return max(_word_f1(answer_words, squad_words(reference)) for reference in references(answer))


def final_number(text: str) -> Fraction | None:
    """Find the first number after the last `####`, or else the last number.

    After `####` a number that is part of an expression or a list is none, except the last side of
    an equation.
    """
    _, mark, tail = text.rpartition(FINAL_ANSWER_MARK)
    if mark:
        value, before, behind = next(find_numbers(tail), (None, "", ""))
        if CONTINUED.match(behind):
            side = behind.partition("\n")[0].rpartition("=")[2]
            value = next(find_numbers(side), (None,))[0] if "=" in behind else None
    else:
        *_, (value, before, _) = [(None, "", ""), *find_numbers(tail)]
    return None if OPEN_NUMBER.search(before) else value


def _reference_numbers(answer: str) -> list[Fraction]:
    numbers = {one: final_number(one) for one in references(answer)}
    for text, number in numbers.items():
        if number is None:
            raise ValueError(
                f"the reference answer {text!r:.40} ends with no number that could be "
                "compared; see data.answer_key"
            )
    return [number for number in numbers.values() if number is not None]


def squad_words(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them: lower case, no punctuation, no
    articles.
    """
    return ARTICLE.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


def _extract_answer(completion: str) -> str:
    text = final_text(completion)
    tagged = tagged_answer(text)
    return text if tagged is None else tagged


def _word_f1(answer_words: list[str], reference_words: list[str]) -> float:
    num_shared = (Counter(answer_words) & Counter(reference_words)).total()
    if not num_shared:
        return 0.0
    return 2 * num_shared / (len(answer_words) + len(reference_words))


HEDGES = set(WORDS[Role.HEDGE].split()) - OR
DENIALS = CALLS_WRONG | {word.replace("'", "") for word in ("isn't", "can't", "don't", "wasn't")}
VERBS = set(f"{WORDS[Role.COPULA]} {WORDS[Role.MODAL]} may might could".split())
MAX_NEAR_CHARACTERS, MAX_OCCURRENCES = 60, 20
LABEL_EDGES = "()[]{}.:,*\"' \t\n"


def explain_gpqa(
    completion: str, *, answer: str, metadata: dict[str, Any], **_: Any
) -> Explanation:
    """Explain which choice the completion makes."""
    text, choices = final_text(completion), _read_choices(metadata)
    right_letter = correct_letter(answer, metadata)
    choice = read_choice(text, num_choices=len(choices))
    letter = choice.label
    if choice.is_open:
        letter = _only_choice_in(text, choices, denied=choice.denied)
    matched_part = "a letter" if choice.label else "the text of a choice" if letter else "no choice"
    return Explanation(
        answer=letter,
        location=matched_part,
        why=f"it {'is' if letter == right_letter else 'is not'} the right letter {right_letter}",
    )


@reward(
    source="GPQA: A Graduate-Level Google-Proof Q&A Benchmark (arXiv 2311.12022)",
    metadata={
        "correct_letter": "the right letter; without it the reference answer must be one",
        "choices": "texts of the choices, A first; may be left out",
    },
    explain=explain_gpqa,
)
def gpqa(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    r"""Give 1 for the right letter after `</think>`, else 0.

    The letter is in a box, in an `<answer>` tag, after words such as "the answer is", before words
    such as "is correct", or starts a line; the last such statement counts. Case, brackets, emphasis
    and LaTeX don't count, and the words may be of ten languages. Several choices, a hedged one
    ("maybe B") and a denied one are no choice, and neither are the article "A" and the pronoun "I".
    A letter beyond the choices counts only if the metadata name no choices. Without a letter, the
    only choice whose text occurs in the answer counts.

    Raises:
        ValueError: Neither metadata nor the reference answer name the correct letter.
    """
    right_letter = correct_letter(answer, metadata)
    return float(explain_gpqa(completion, answer=answer, metadata=metadata).answer == right_letter)


@reward(source="Answers inside of <answer> tags, as R1-style prompts ask for them")
def multiple_choice(
    completion: str, *, answer: str, metadata: dict[str, Any], prompt: str
) -> float:
    """Give 1 when the last `<answer>` tag holds the reference answer, else 0.

    Case, brackets and a full stop don't count. A letter is read as by `gpqa`.

    Raises:
        ValueError: The sample has no reference answer.
    """
    tagged = [(one, tagged_answer(one)) for one in references(answer)]
    reference_labels = [_label(one if inside is None else inside) for one, inside in tagged]
    if not all(reference_labels):
        raise ValueError(f"the reference answer {answer!r:.40} holds no label; see data.answer_key")
    tag_answer = tagged_answer(completion)
    if tag_answer is None:
        return 0.0
    letter = read_choice(f"{ANSWER_TAG}{tag_answer}{ANSWER_TAG_END}").label or ""
    return float(bool({_label(tag_answer), letter.casefold()} & set(reference_labels)))


def correct_letter(answer: str, metadata: dict[str, Any]) -> str:
    """Return the correct letter from the metadata or the reference answer.

    Raises:
        ValueError: Neither does.
    """
    letter = (
        str(metadata.get("correct_letter") or _find_letter(answer, _read_choices(metadata)))
        .strip(LABEL_EDGES)
        .upper()
    )
    if not re.fullmatch("[A-Z]", letter):
        raise ValueError(
            f"the right letter must be one of A to Z, got {letter!r:.40}; see "
            "metadata.correct_letter and data.answer_key"
        )
    return letter


def _read_choices(metadata: dict[str, Any]) -> list[str]:
    return [str(choice) for choice in metadata.get("choices") or []]


def _label(text: str) -> str:
    return text.strip(LABEL_EDGES).casefold()


def _find_letter(answer: str, choices: list[str]) -> str:
    """Return the letter of the choice that equals a reference answer, else the answer itself."""
    words = squad_words(answer)
    return next(
        (_letter(index) for index, choice in enumerate(choices) if squad_words(choice) == words),
        answer,
    )


def _only_choice_in(text: str, choices: list[str], *, denied: frozenset[str]) -> str | None:
    """Return the letter of the one choice whose text occurs; one that is part of a longer choice,
    or is denied, does not count, and next to a hedge there is none.
    """
    spaced = f" {' '.join(squad_words(text))} "
    spans = [
        (start, start + len(words), _letter(index))
        for index, choice in enumerate(choices)
        if (words := f" {' '.join(squad_words(choice))} ").strip()
        for start in _find_all(words, spaced)
    ]
    whole = [
        one
        for one in spans
        if not any(
            start <= one[0] and one[1] <= end and end - start > one[1] - one[0]
            for start, end, _ in spans
        )
    ]
    near = {one: _words_around(spaced, *one[:2]) for one in whole}
    if any(words & HEDGES for words in near.values()):
        return None
    labels = {one[2] for one, words in near.items() if not words & DENIALS} - denied
    return min(labels) if len(labels) == 1 else None


def _find_all(part: str, text: str) -> list[int]:
    """Return where a part occurs in a text, at most `MAX_OCCURRENCES` times."""
    starts: list[int] = []
    start = text.find(part)
    while start >= 0 and len(starts) < MAX_OCCURRENCES:
        starts.append(start)
        start = text.find(part, start + 1)
    return starts


def _words_around(text: str, start: int, end: int) -> set[str]:
    before = text[max(start - MAX_NEAR_CHARACTERS, 0) : start].split()
    behind = text[end : end + MAX_NEAR_CHARACTERS].split()
    is_subject = bool(behind) and (behind[0] in VERBS or behind[0] in DENIALS - {"not", "never"})
    return {*before[-4:], *(behind[:3] if is_subject else [])}


def _letter(index: int) -> str:
    return chr(ord("A") + index)
