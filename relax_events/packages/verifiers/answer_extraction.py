"""Extract the final answer of a completion, and parse reference answers."""

from __future__ import annotations

import re

import orjson

from relax_events.api.rewards import RewardError

MAX_ANSWER_CHARACTERS = 2000
THOUGHT_END = "</think>"
ANSWER_TAG, ANSWER_TAG_END = "<answer>", "</answer>"
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
GLM_BOX = re.compile(
    r"<\|begin_of_box\|>((?:(?!<\|(?:begin|end)_of_box\|>).)*)<\|end_of_box\|>", re.DOTALL
)
"""The box of the GLM family, which writes it in tokens of its own."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
DOUBLE = re.compile(r"\[([^\[\]]*)\]")
BARE = re.compile(r"[^\s$.,;]+")
JOINS = re.compile(r"\b(?:and|or)\b|[,;]")
RETRACTION = re.compile(
    r"\b(?:not|wait|no|actually|wrong|incorrect|mistake|sorry|instead|rather)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
"""Words between two boxes by which the second one replaces the first."""
MAX_TOUCHING, MAX_JOINED, MAX_BOXES = 10, 70, 50
PLACEHOLDER = re.compile(
    r"[\s.?_\u2026]*|\\[lc]?dots"
    r"|(?:\\text\{)?\s*(?:your |the |final |correct )*answer(?: here)?\s*\}?",
    re.IGNORECASE,
)
"""The content of a box that shows where an answer would stand."""
DENIAL = re.compile(
    r"(?:\b(?:not|nor|never|maybe|perhaps|possibly)|n['\u2019]t)(?:\s+(?:equal|be|to))*[\s:$*\\(\[]*$",
    re.IGNORECASE,
)
ALTERNATIVE = re.compile(r"\bor[\s:$*\\(\[]*$", re.IGNORECASE)
LATER_DENIAL = re.compile(
    r"[\s$*.,\\)\]]*(?:(?:is|was|would be|can)\s*(?:not|n['\u2019]t|wrong|incorrect|false)\b"
    r"|\?\s*(?:no|not|wrong|incorrect)\b)",
    re.IGNORECASE,
)


def final_text(completion: str) -> str:
    """Return the text after the reasoning: after the last `</think>`, or all of it."""
    return completion.rpartition(THOUGHT_END)[2].strip()


def tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>` tag, or None."""
    before, end_tag, _ = text.rpartition(ANSWER_TAG_END)
    _, tag, content = before.rpartition(ANSWER_TAG)
    return content.strip() if tag and end_tag else None


def bracketed_answer(text: str) -> str | None:
    """Return the content of the last `[...]` or `[[...]]`, or None if there is none, or it is
    denied, an alternative, a placeholder or the text of a link.
    """
    end, depth = text.rfind("]"), 0
    for start in range(end, max(end - MAX_ANSWER_CHARACTERS, -1), -1):
        depth += (text[start] == "]") - (text[start] == "[")
        if depth == 0:
            content = text[start + 1 : end].strip()
            content = DOUBLE.sub(r"\1", content)
            is_link = text.startswith("(", end + 1)
            return None if is_link or not _is_answer(text, start, end + 1, content) else content
    return None


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, or None if there is none or it is not closed.

    Raises:
        RewardError: It is too long for an answer.
    """
    boxes = last_boxes(text)
    return boxes[-1] if boxes else None


def last_boxes(text: str) -> list[str]:
    r"""Return the contents of the last `\boxed{}` and of the boxes before it that belong to the
    same answer, in order.

    Boxes belong together if they touch, or if fewer than 70 characters with a comma, a semicolon,
    "and" or "or" join them, and no word corrects the first. An unclosed last box gives an empty
    list. A box that holds a placeholder, or that is denied, is no answer and left out.

    Raises:
        RewardError: A box is too long for an answer, or there are too many.
    """
    return _boxes(text, only_joined=True)


def reference_boxes(text: str) -> list[str]:
    """Return the boxed answers of a reference; if there are several, all are required.

    Raises:
        ValueError: Boxes far from each other hold different answers, so the reference is ambiguous.
    """
    boxes = last_boxes(text)
    if len(boxes) != len(every := _boxes(text, only_joined=False)):
        boxes_text = ", ".join(every)
        raise ValueError(
            f"the reference answer boxes {boxes_text:.80} far from each other; keep only the "
            "correct answer, see data.answer_key"
        )
    return boxes


def _boxes(text: str, *, only_joined: bool) -> list[str]:
    text = GLM_BOX.sub(lambda box: rf"\boxed{{{box[1]}}}", text)
    boxes: list[str] = []
    next_start = len(text)
    for box in reversed(list(BOX.finditer(text))):
        content, end = _read_box(text, box.end())
        if (
            content is None
            or end > next_start
            or (boxes and only_joined and not _are_joined(text[end:next_start]))
        ):
            break
        if content not in boxes and _is_answer(text, box.start(), end, content):
            boxes.append(content)
        if len(boxes) > MAX_BOXES:
            raise RewardError(f"the answer has more than {MAX_BOXES} boxes")
        next_start = box.start()
    return boxes[::-1]


def _is_answer(text: str, start: int, end: int, content: str) -> bool:
    """Return whether a box holds an answer: no placeholder, not denied or doubted by the words
    around it, and no alternative to an answer without a box.
    """
    before = text[max(0, start - MAX_JOINED) : start]
    return not (
        PLACEHOLDER.fullmatch(content)
        or DENIAL.search(before)
        or LATER_DENIAL.match(text[end : end + MAX_JOINED])
        or (ALTERNATIVE.search(before) and not BOX.search(before))
    )


def _are_joined(between: str) -> bool:
    if len(between) >= MAX_JOINED or RETRACTION.search(between):
        return False
    return len(between) < MAX_TOUCHING or JOINS.search(between) is not None


def _read_box(text: str, start: int) -> tuple[str | None, int]:
    """Return the content of the box whose command ends at `start`, and the end of the box."""
    if not text.startswith("{", start):
        bare = BARE.match(text, start)
        return (bare[0], bare.end()) if bare else (None, start)
    depth = 0
    for brace in BRACE.finditer(text, start):
        if brace.start() - start > MAX_ANSWER_CHARACTERS:
            raise RewardError(f"the boxed answer is longer than {MAX_ANSWER_CHARACTERS} characters")
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return short_answer(text[start + 1 : brace.start()]), brace.end()
    return None, start


def short_answer(text: str) -> str:
    """Check the length of an answer, and return it stripped.

    Raises:
        RewardError: The answer is too long.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise RewardError(
            f"the answer has {len(text)} characters, at most {MAX_ANSWER_CHARACTERS} are compared"
        )
    return text.strip()


def references(answer: str) -> list[str]:
    """Return the reference answers: the one answer, or the alternatives of a JSON list.

    Raises:
        ValueError: There is no reference answer.
    """
    alternatives = [answer]
    if answer.lstrip().startswith("["):
        try:
            parsed = orjson.loads(answer)
        except (
            orjson.JSONDecodeError
        ):  # an interval such as [0, 1) is an answer, not a list of some
            parsed = None
        if isinstance(parsed, list) and all(isinstance(one, str) for one in parsed):
            alternatives = parsed
    if not (kept := [one.strip() for one in alternatives if one.strip()]):
        raise ValueError("the sample has no reference answer; see data.answer_key")
    return kept
