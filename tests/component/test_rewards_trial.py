"""`relax rewards score`: completions are scored in child processes, and the answer that was found is shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.cli.rewards import score
from relax_events.errors import ConfigError

pytestmark = pytest.mark.component
NO_COMMA = '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'


@pytest.mark.parametrize(
    ("name", "given", "reward", "answer", "why"),
    [
        ("math", {"completion": "The answer is $100$ dollars.", "answer": "100"}, 1.0, "100", "it equals '100'"),
        ("math", {"completion": r"so \boxed{4}", "answer": "5"}, 0.0, "4", "it does not equal '5'"),
        ("math", {"completion": "The answer is 5.", "answer": "5", "option": ["box_only=true"]}, 0.0, None, "nothing is boxed"),
        ("deepscaler", {"completion": r"\boxed{5}", "answer": "5"}, 0.0, None, "the reasoning has no end, </think> or ### Response"),
        ("geo3k", {"completion": r"\boxed{5}", "answer": "5"}, 0.9, "5", "it equals '5'"),
        ("dapo_math", {"completion": "Answer: 3", "answer": "4"}, -1.0, "3", "it is not '4'"),
        ("gsm8k", {"completion": "it is 5", "answer": "#### 5"}, 1.0, "5", "it is 5"),
        ("gpqa", {"completion": "C is correct", "answer": "B"}, 0.0, "C", "it is not the right letter B"),
        ("ifeval", {"completion": "a, b", "metadata": NO_COMMA}, 0.0, "a, b", "not followed: punctuation:no_comma"),
        ("exact_match", {"completion": "a", "answer": "a"}, 1.0, None, None),
    ],
)
def test_score_shows_reward_answer_and_reason(
    name: str, given: dict[str, Any], reward: float, answer: str | None, why: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(name, **given, output="json") == 0
    (found,) = orjson.loads(capsys.readouterr().out)
    assert (found["reward"], found["answer"], found["why"]) == (pytest.approx(reward), answer, why)


def test_score_reads_lines_of_a_file_and_shows_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"completion": "The answer is 4.", "answer": "4"}, {"completion": "x", "answer": ""}, {"completion": r"\boxed{1}", "answer": "1"}]
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"\n\n".join(orjson.dumps(row) for row in rows))
    assert score("math", jsonl=file) == 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["line", "reward", "answer", "found", "why"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "3", "5"]
    assert "the sample has no reference answer" in lines[2]
    assert lines[3].split()[1:3] == ["1", "1"]


def test_score_reads_a_completion_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("so it is 7"))
    assert score("gsm8k", completion="-", answer="7") == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["reward                    1.0", "answer                    7"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "give either --completion or --jsonl"),
        ({"completion": "a", "metadata": "[1]"}, "--metadata: metadata must be a JSON object"),
        ({"completion": "a", "metadata": "{"}, "--metadata: metadata is not JSON"),
        ({"jsonl": "none.jsonl"}, "--jsonl .*none.jsonl can't be read: No such file"),
        ({"jsonl": "[1]"}, "1 must be an object with the text `completion`"),
        ({"jsonl": "{"}, "1 is not JSON"),
    ],
)
def test_score_names_what_it_can_not_read(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    if "jsonl" in given:
        file = tmp_path / "none.jsonl"
        if not str(given["jsonl"]).startswith("none"):
            file.write_text(given["jsonl"])
        given = {"jsonl": file}
    with pytest.raises(ConfigError, match=text):
        score("math", **given)


def test_score_refuses_a_reward_of_prompt_groups() -> None:
    with pytest.raises(ConfigError, match="genrm_pairwise scores prompt groups"):
        score("genrm_pairwise", completion="a", option=["url=http://localhost:1"])
