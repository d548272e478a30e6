"""Columns of a row are read as prompt and completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_events.config import DataConfig
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError

USER, BOT, MORE, END = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "and?"), ("assistant", "bye"))
)
OTHER = {"role": "assistant", "content": "no"}


def row_of(tmp_path: Path, columns: dict[str, Any], **keys: Any) -> PromptRow:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    return open_source(DataConfig.model_validate({"source": f"jsonl:{path}"} | keys), seed=0).row(0)


def read_texts(row: PromptRow) -> tuple[list[str], list[list[str]], str]:
    return (
        [message.text for message in row.messages],
        [[message.text for message in one] for one in row.completions],
        row.answer,
    )


@pytest.mark.parametrize("completion", ["yo", [BOT]], ids=["text", "messages"])
def test_single_completion_message_becomes_the_answer(tmp_path: Path, completion: Any) -> None:
    row = row_of(
        tmp_path,
        {"prompt": "hi", "completion": completion, "level": 1},
        completion_key="completion",
    )
    assert read_texts(row) == (["hi"], [], "yo")
    assert row.metadata == '{"level":1}'


def test_completion_and_reference_answer_are_kept_separately(tmp_path: Path) -> None:
    row = row_of(
        tmp_path,
        {"prompt": "hi", "completion": "so: yo", "answer": "yo"},
        completion_key="completion",
        answer_key="answer",
    )
    assert read_texts(row) == (["hi"], [["so: yo"]], "yo")


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("all", (["hi"], [["yo", "and?", "bye"]], "")), ("last", (["hi", "yo", "and?"], [], "bye"))],
)
def test_conversation_is_cut_before_the_completion(
    tmp_path: Path, train_on: str, expected: Any
) -> None:
    row = row_of(
        tmp_path,
        {"messages": [USER, BOT, MORE, END]},
        conversation_key="messages",
        train_on=train_on,
    )
    assert read_texts(row) == expected
    assert row.metadata == "{}"


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"prompt": "hi", "chosen": "yo", "rejected": "no"}, {}),
        ({"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]}, {}),
        ({"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, OTHER]}, {}),
        ({"chosen": [USER, BOT], "rejected": [USER, OTHER]}, {"prompt_key": ""}),
    ],
    ids=["texts", "messages", "messages with the prompt", "prompt in both"],
)
def test_preference_pair_has_one_prompt_and_the_chosen_answer_first(
    tmp_path: Path, columns: dict[str, Any], keys: dict[str, Any]
) -> None:
    row = row_of(tmp_path, columns, chosen_key="chosen", rejected_key="rejected", **keys)
    assert read_texts(row) == (["hi"], [["yo"], ["no"]], "")


def test_preference_pair_prompt_is_the_common_prefix_of_its_conversations(tmp_path: Path) -> None:
    columns = {"c": [USER, BOT, MORE, END], "r": [USER, BOT, MORE, OTHER]}
    row = row_of(tmp_path, columns, prompt_key="", chosen_key="c", rejected_key="r")
    assert read_texts(row) == (["hi", "yo", "and?"], [["bye"], ["no"]], "")
    early = row_of(
        tmp_path,
        {"c": [USER, BOT, MORE, END], "r": [USER, BOT, USER, OTHER]},
        prompt_key="",
        chosen_key="c",
        rejected_key="r",
    )
    assert read_texts(early) == (["hi"], [["yo", "and?", "bye"], ["yo", "hi", "no"]], "")


@pytest.mark.parametrize(
    ("columns", "keys", "text"),
    [
        (
            {"m": [USER, BOT, MORE]},
            {"conversation_key": "m"},
            "m: a completion must begin and end with a message of role 'assistant', got 'user'",
        ),
        (
            {"m": [BOT]},
            {"conversation_key": "m"},
            (
                "m begins with an assistant message; the prompt must have at least one message "
                "before it"
            ),
        ),
        ({"m": "hi"}, {"conversation_key": "m"}, "m: a completion must begin and end"),
        (
            {"prompt": "hi", "c": ""},
            {"completion_key": "c"},
            "c is an empty string; an answer is a non-empty string or a list",
        ),
        ({"prompt": "hi", "c": [USER, BOT]}, {"completion_key": "c"}, "got 'user', 'assistant'"),
        (
            {"prompt": "hi"},
            {"completion_key": "c"},
            "has no key 'c', only 'prompt'; set data.completion_key",
        ),
        (
            {"prompt": "hi", "c": "yo", "r": "yo"},
            {"chosen_key": "c", "rejected_key": "r"},
            "has the same completion as chosen and rejected",
        ),
        (
            {"c": [BOT], "r": [OTHER]},
            {"prompt_key": "", "chosen_key": "c", "rejected_key": "r"},
            "chosen and rejected have no common prefix",
        ),
        (
            {"prompt": "ho", "c": [USER, BOT], "r": "no"},
            {"chosen_key": "c", "rejected_key": "r"},
            "chosen: a completion must begin",
        ),
    ],
)
def test_invalid_row_is_rejected_by_location_and_column(
    tmp_path: Path, columns: dict[str, Any], keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"rows.jsonl:1.*{text}"):
        row_of(tmp_path, columns, **keys)
