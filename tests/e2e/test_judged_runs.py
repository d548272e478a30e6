"""A policy learns from the scores of an LLM judge that the run hosts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from command_line import Relax, report_of, write_rows

from relax_events.config import load_run_config
from relax_events.data.sources import create_task

ROOT = Path(__file__).parents[2]
TASK = {"min_string_length": 5, "max_string_length": 5}
TEMPLATE = "Reference: {answer}\nAnswer: {completion}"
JUDGE_RUN = """
[run]
id = "judge"
[model]
path = "{folder}/judge"
tiny = {{ hidden_size = 64, num_layers = 2 }}
[data]
source = "jsonl:{folder}/judgements.jsonl"
[sft_warmup]
steps = {steps}
target_loss = 0.002
"""


def alter(answer: str, chance: random.Random) -> str:
    """Return a variant of an answer: with other, fewer or more characters."""
    characters = list(answer)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        characters[chance.randrange(len(characters))] = chance.choice("ABCDE")
    if chance.random() < 0.4:
        index = chance.randrange(len(characters))
        characters[index : index + chance.randrange(2)] = chance.choice(
            ("", "A", "B", "C", "D", "E")
        )
    return "".join(characters)


def judgement(answer: str, completion: str) -> str:
    """Compare character by character, as a judge should."""
    marks = [
        "=" if answer[index : index + 1] == completion[index : index + 1] else "x"
        for index in range(max(len(answer), len(completion)))
    ]
    return f"{''.join(marks)}\nScore: {int(answer == completion)}"


def judgements(count: int) -> list[dict[str, Any]]:
    """Make judge prompts about the quickstart's problems, with the expected judgements."""
    problems, chance = (
        create_task("string_insertion", size=count, seed=5, options=TASK),
        random.Random(0),
    )
    rows = []
    for number in range(count):
        answer = problems[number]["answer"]
        completion = answer if chance.random() < 0.5 else alter(answer, chance)
        rows.append(
            {
                "prompt": TEMPLATE.format(answer=answer, completion=completion),
                "answer": judgement(answer, completion),
            }
        )
    return rows


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_quickstart_learns_with_rewards_of_a_judge_model(
    relax: Relax, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "judgements.jsonl", judgements(40_000))
    (tmp_path / "judge.toml").write_text(JUDGE_RUN.format(folder=tmp_path, steps=600))
    made = relax("models", "prepare", "judge.toml", timeout_seconds=1000)
    assert made.code == 0, made.err

    template = TEMPLATE.format(answer="$answer", completion="$completion")
    config = load_run_config(ROOT / "configs/quickstart.toml").model_dump(mode="json")
    config["run"]["num_steps"] = 50
    config["run"]["id"], config["broker"]["bootstrap_servers"] = run_id, bootstrap_servers
    config["reward"] = {"function": "genrm", "options": {"template": template, "max_score": 1}}
    sampling = {"top_k": 1, "max_new_tokens": 24}
    engine = {"max_context_tokens": 128, "max_running_samples": 64, "sampling": sampling}
    config["judge"] = {
        "model_path": str(tmp_path / "judge"),
        "on_parse_error": "zero",
        "engine": engine,
    }
    dataset = {
        "name": "truth",
        "source": config["data"]["source"],
        "num_problems": 200,
        "options": TASK,
        "reward": {"function": "reasoning_gym"},
    }
    config["evaluation"] = {
        "every": 50,
        "datasets": [dataset | {"sampling": {"top_k": 1, "max_new_tokens": 8}}],
    }
    (tmp_path / "run.json").write_bytes(orjson.dumps(config))
    ended = relax("run", "run.json", timeout_seconds=1000)
    assert ended.code == 0, ended.err

    report = report_of(tmp_path, run_id)
    assert (report["samples_lost"], report["samples_trained_twice"], report["ledger_problems"]) == (
        0,
        0,
        [],
    )
    first, last = (report["curves"]["reward_mean"][index] for index in (0, -1))
    truth = [entry["reward_mean"] for entry in report["evaluations"]]
    assert first < 0.5
    assert last > 0.8
    assert truth[-1] > 0.8, "the policy has learned the task, and not the judge's weaknesses alone"
    shown = relax("samples", "run.json", "--from", "beginning", "--limit", "1", "--output", "json")
    assert shown.code == 0, shown.err
    sample_id = orjson.loads(shown.out.splitlines()[0])["sample_id"]
    assert "judge response:\n    " in relax("samples", "run.json", "--sample", sample_id).out
