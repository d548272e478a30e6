"""`relax rewards NAME`: completions are scored in child processes, and the extracted
answer is printed.
"""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.cli.rewards import ComparisonOptions, TextOptions, rewards
from relax_events.errors import ConfigError

pytestmark = pytest.mark.component
NO_COMMA = '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'


TEXT = {field.name for field in fields(TextOptions)}
COMPARISON = {field.name for field in fields(ComparisonOptions)}


def run_rewards(*names: str, **arguments: Any) -> int:
    """Call the command with its arguments by name, whichever group they belong to."""
    text = {name: arguments.pop(name) for name in TEXT & set(arguments)}
    options = {name: arguments.pop(name) for name in COMPARISON & set(arguments)}
    return rewards(
        *names, text=TextOptions(**text), options=ComparisonOptions(**options), **arguments
    )


@pytest.mark.parametrize(
    ("name", "given", "reward", "answer", "why"),
    [
        (
            "math",
            {"completion": "The answer is $100$ dollars.", "answer": "100"},
            1.0,
            "$100$ dollars",
            "it equals '100'",
        ),
        ("math", {"completion": r"so \boxed{4}", "answer": "5"}, 0.0, "4", "it does not equal '5'"),
        (
            "math",
            {"completion": "The answer is 5.", "answer": "5", "option": ["box_only=true"]},
            0.0,
            None,
            "nothing is boxed",
        ),
        (
            "deepscaler",
            {"completion": r"\boxed{5}", "answer": "5"},
            0.0,
            None,
            "the reasoning has no end, </think> or ### Response",
        ),
        ("geo3k", {"completion": r"\boxed{5}", "answer": "5"}, 0.9, "5", "it equals '5'"),
        ("dapo_math", {"completion": "Answer: 3", "answer": "4"}, -1.0, "3", "it is not '4'"),
        ("gsm8k", {"completion": "it is 5", "answer": "#### 5"}, 1.0, "5", "it is 5"),
        (
            "gpqa",
            {"completion": "C is correct", "answer": "B"},
            0.0,
            "C",
            "it is not the right letter B",
        ),
        (
            "ifeval",
            {"completion": "a, b", "metadata": NO_COMMA},
            0.0,
            "a, b",
            "not followed: punctuation:no_comma",
        ),
        ("exact_match", {"completion": "a", "answer": "a"}, 1.0, None, None),
    ],
)
def test_score_shows_reward_answer_and_reason(
    name: str,
    given: dict[str, Any],
    reward: float,
    answer: str | None,
    why: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_rewards(name, **given, output="json") == 0
    (found,) = orjson.loads(capsys.readouterr().out)
    assert (found["reward"], found["answer"], found["why"]) == (pytest.approx(reward), answer, why)


def test_score_reads_lines_of_a_file_and_shows_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"completion": "The answer is 4.", "answer": "4"},
        {"completion": "x", "answer": ""},
        {"completion": r"\boxed{1}", "answer": "1"},
    ]
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"\n\n".join(orjson.dumps(row) for row in rows))
    assert run_rewards("math", jsonl=file) == 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["line", "reward", "answer", "found", "why"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "3", "5"]
    assert "the sample has no reference answer" in lines[2]
    assert lines[3].split()[1:3] == ["1", "1"]


def test_score_reads_a_completion_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("so it is 7"))
    assert run_rewards("gsm8k", completion="-", answer="7") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "reward                    1.0",
        "answer                    7",
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"completion": "a", "jsonl": "[1]"}, "--completion and --jsonl exclude each other"),
        ({"completion": "a", "metadata": "[1]"}, "--metadata: metadata must be a JSON object"),
        ({"completion": "a", "metadata": "{"}, "--metadata: metadata is not JSON"),
        ({"jsonl": "none.jsonl"}, "--jsonl .*none.jsonl can't be read: No such file"),
        ({"jsonl": "[1]"}, "1 must be an object with the text `completion`"),
        ({"jsonl": "{"}, "1 is not JSON"),
    ],
)
def test_score_command_error_names_unreadable_input(
    given: dict[str, Any], text: str, tmp_path: Path
) -> None:
    if "jsonl" in given:
        file = tmp_path / "none.jsonl"
        if not str(given["jsonl"]).startswith("none"):
            file.write_text(given["jsonl"])
        given |= {"jsonl": file}
    with pytest.raises(ConfigError, match=text):
        run_rewards("math", **given)


def test_score_command_rejects_a_reward_that_scores_prompt_groups() -> None:
    with pytest.raises(
        ConfigError, match="genrm_pairwise scores prompt groups, which texts are not"
    ):
        run_rewards("genrm_pairwise", completion="a", option=["url=http://localhost:1"])


def write_lines(folder: Path, *rows: dict[str, str]) -> Path:
    file = folder / "samples.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return file


def test_compare_counts_where_two_rewards_differ_and_shows_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(
        tmp_path,
        {"completion": "so 1/2, which is 0.5", "answer": "0.5"},  # both right
        {"completion": "so 4", "answer": "5"},  # both wrong
        {"completion": r"3 apples and 4 pears: \\boxed{7}. It took me 2 steps", "answer": "7"},
        {"completion": "x", "answer": ""},  # math fails
    )
    run_rewards("math", "gsm8k", jsonl=file, output="json")
    found = orjson.loads(capsys.readouterr().out)
    assert (
        found["num_samples"],
        found["num_agree"],
        found["num_differ"],
        found["num_first_higher"],
    ) == (4, 2, 1, 1)
    assert (found["num_first_failed"], found["num_both_failed"]) == (
        1,
        found["num_second_failed"],
    )
    (example, *_) = found["examples"]
    assert (example["sample_id"], example["answer"], example["completion_end"][-5:]) == (
        "3",
        "7",
        "steps",
    )
    assert [
        (side["reward"], side["answer"], side["why"])
        for side in (example["first"], example["second"])
    ] == [
        (1.0, "7", "it equals '7'"),
        (0.0, "2", "it is not 7"),
    ]
    run_rewards("math", "gsm8k", jsonl=file, limit=1)
    out = capsys.readouterr().out
    assert "differ                    1; first higher 1, second higher 0" in out
    assert "it equals '7'" in out


def test_compare_takes_a_threshold_for_rewards_of_other_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(
        tmp_path,
        {"completion": "Answer: 4", "answer": "5"},
        {"completion": "Answer: 5", "answer": "5"},
    )
    assert [compared_differ(file, capsys, threshold=threshold) for threshold in (None, 0.5)] == [
        1,
        0,
    ]


def compared_differ(file: Path, capsys: pytest.CaptureFixture[str], **given: Any) -> int:
    run_rewards("math", "dapo_math", jsonl=file, output="json", **given)
    return int(orjson.loads(capsys.readouterr().out)["num_differ"])


def test_compare_passes_separate_options_to_each_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path, {"completion": "The answer is 5.", "answer": "5"})
    run_rewards("math", "math", jsonl=file, second_option=["box_only=true"], output="json")
    assert orjson.loads(capsys.readouterr().out)["num_first_higher"] == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "two functions are compared on --run or on --jsonl"),
        ({"run": "a", "jsonl": Path("b")}, "--jsonl and --run exclude each other"),
        ({"jsonl": Path("b"), "limit": -1}, "--limit must be >= 0, got -1"),
        ({"jsonl": Path("b"), "version": "1"}, "--version selects samples of a run"),
    ],
)
def test_compare_rejects_incompatible_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run_rewards("math", "gsm8k", **given)
