"""Where a completion's final answer stands, and what the reference answers are."""

from __future__ import annotations

import re

import orjson

from relax_events.errors import RewardError

MAX_ANSWER_CHARACTERS = 2000
THOUGHT_END = "</think>"
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[^\s$.,;]+")


def final_text(completion: str) -> str:
    """Return what follows the reasoning: the text after the last `</think>`, or all of it."""
    return completion.rpartition(THOUGHT_END)[2].strip()


def tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>` tag, or None."""
    found = ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, or None where there is none or it is not closed.

    Raises:
        RewardError: It is too long for an answer.
    """
    box = None
    for box in BOX.finditer(text):  # noqa: B007 the last one counts
        pass
    if box is None:
        return None
    if not text.startswith("{", box.end()):
        bare = BARE.match(text, box.end())
        return bare[0] if bare else None
    return _braced(text, box.end())


def _braced(text: str, start: int) -> str | None:
    depth = 0
    for found in BRACE.finditer(text, start):
        if found.start() - start > MAX_ANSWER_CHARACTERS:
            raise RewardError(f"the boxed answer is longer than {MAX_ANSWER_CHARACTERS} characters")
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return short_answer(text[start + 1 : found.start()])
    return None


def short_answer(text: str) -> str:
    """Return an answer as it is.

    Raises:
        RewardError: It is too long for one.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise RewardError(f"the answer has {len(text)} characters, at most {MAX_ANSWER_CHARACTERS} are compared")
    return text.strip()


def references(answer: str) -> list[str]:
    """Return the reference answers: one, or those of a JSON list of which any will do.

    Raises:
        ValueError: There is none, so nothing can be right or wrong.
    """
    found = [answer]
    if answer.lstrip().startswith("["):
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError:  # an interval such as [0, 1) is an answer, not a list of some
            parsed = None
        if isinstance(parsed, list) and parsed and all(isinstance(one, str) for one in parsed):
            found = parsed
    if not (kept := [one.strip() for one in found if one.strip()]):
        raise ValueError("the sample has no reference answer; see data.answer_key")
    return kept
