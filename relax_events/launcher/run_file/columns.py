"""Guesses the roles of a dataset's columns, and a reward, from its first rows: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_events.errors import ConfigError

PROMPTS = ("prompt", "question", "problem", "input", "instruction", "query", "messages")
ANSWERS = (
    "answer",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "solution",
    "target",
    "label",
    "output",
    "response",
)
MEDIA = {
    "image": ("image", "images"),
    "audio": ("audio", "audios"),
    "video": ("video", "videos"),
}
NUMBER = re.compile(r"[-+$]?\d[\d,]*(\.\d+)?%?")
LATEX = re.compile(r"\\(boxed|frac|sqrt|pi|text|left|cdot)|[\^_]\{")
LETTER = re.compile(r"\(?[A-Ha-h]\)?\.?")
MOST = 0.9
SHORT_WORDS = 6
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """The roles of columns; `answer` is empty where none looks like one."""

    prompt: str
    answer: str
    media: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProposedReward:
    """A reward function, why it fits, and a system prompt that asks for the form it reads."""

    function: str
    why: str
    system_prompt: str = ""


def value_at(row: Row, key: str) -> Any:
    """Return a column, or None if the row lacks it; dots lead into objects."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def guess_columns(rows: Sequence[Row], *, prompt: str = "", answer: str = "") -> Columns:
    """Return the roles of the columns.

    Args:
        rows: The first rows, at least one.
        prompt: The prompt's column, where it is known.
        answer: The reference answer's, likewise.
    Raises:
        ConfigError: No column looks like a prompt, or the rows bring completions to learn.
    """
    names = ", ".join(sorted(rows[0]))
    for name in (prompt, answer):
        if name and all(value_at(row, name) is None for row in rows):
            raise ConfigError(f"the dataset has no column {name!r}, only {names}")
    if not prompt and {"chosen", "rejected"} <= rows[0].keys():
        raise ConfigError(_describe_data_to_learn("preference pairs", "configs/dpo.toml"))
    chosen = prompt or next((name for name in PROMPTS if _all(rows, name, _is_prompt)), "")
    if not chosen:
        if any(_all(rows, name, _is_conversation) for name in ("messages", "conversations")):
            raise ConfigError(_describe_data_to_learn("whole conversations", "configs/sft.toml"))
        raise ConfigError(
            f"no column of the dataset looks like a prompt, only {names}; name it: --prompt COLUMN"
        )
    media = {
        kind: name
        for kind, columns in MEDIA.items()
        for name in columns
        if _all(rows, name, lambda value: value is not None)
    }
    answers = (name for name in ANSWERS if name != chosen and _all(rows, name, _is_answer))
    return Columns(chosen, answer or next(answers, ""), media)


def _describe_data_to_learn(what: str, example: str) -> str:
    return (
        f"the dataset brings {what} to learn from, not prompts to answer; begin with {example}, "
        "and see docs/how-to/supervised-fine-tuning.md"
    )


def _all(rows: Sequence[Row], name: str, holds: Callable[[Any], bool]) -> bool:
    return all(holds(value_at(row, name)) for row in rows)


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and "content" in one for one in value)
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return _is_messages(value) and value[-1].get("role") != "assistant"


def _is_conversation(value: Any) -> bool:
    return _is_messages(value) and value[-1].get("role") == "assistant"


def _is_answer(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and bool(value.strip()))


def propose_reward(rows: Sequence[Row], columns: Columns) -> ProposedReward:
    """Return the installed reward that fits the rows.

    Raises:
        ConfigError: None does; the text says how to name one.
    """
    first = rows[0].keys()
    if {"instruction_id_list", "kwargs"} <= first:
        return ProposedReward("ifeval", "the rows have instruction_id_list and kwargs")
    if "tests" in first or {"inputs", "outputs"} <= first:
        return ProposedReward("code", "the rows have tests", "Answer with one Python block.")
    if not columns.answer:
        raise ConfigError(
            "no column of the dataset looks like a reference answer; name it: --answer COLUMN, or "
            "name a reward that needs none: --reward path/to/file.py:function"
        )
    answers = [str(value_at(row, columns.answer)).strip() for row in rows]
    for share, proposed in _by_answers(answers):
        if share >= MOST:
            return proposed
    raise ConfigError(
        f"the answers in {columns.answer!r} are texts that no installed reward compares, for "
        f"example {answers[0]!r:.60}; name a reward: --reward path/to/file.py:function, or genrm"
    )


def _by_answers(answers: Sequence[str]) -> list[tuple[float, ProposedReward]]:
    def share(holds: Callable[[str], Any]) -> float:
        return sum(bool(holds(answer)) for answer in answers) / len(answers)

    boxed = "Reason step by step, and put your final answer within \\boxed{}."
    return [
        (
            share(lambda answer: "####" in answer),
            ProposedReward(
                "gsm8k",
                "the answers end in #### and a number",
                "Reason step by step. End with a line of #### and the number alone.",
            ),
        ),
        (
            share(LETTER.fullmatch),
            ProposedReward(
                "multiple_choice",
                "the answers are labels of choices",
                "Think, then give the label of your choice in <answer></answer>.",
            ),
        ),
        (
            share(lambda answer: NUMBER.fullmatch(answer) or LATEX.search(answer)),
            ProposedReward("math", "the answers are numbers or LaTeX", boxed),
        ),
        (
            share(lambda answer: len(answer.split()) == 1),
            ProposedReward("exact_match", "the answers are single words"),
        ),
        (
            share(lambda answer: len(answer.split()) <= SHORT_WORDS),
            ProposedReward("f1", "the answers are a few words"),
        ),
    ]
