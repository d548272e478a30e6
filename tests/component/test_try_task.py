"""`relax try`: prompts, environments and programs are played as a run does, without one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from engine_requests import tiny_model
from gateway_agents import write_program

from relax_events.cli.try_task import try_task
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage
from relax_events.launcher.workbench import Workbench

REWARDS = """
def by_length(completion, *, answer):
    return {"reward": len(completion) / 10, "length": float(len(completion))}

def broken(completion, *, answer):
    raise KeyError("no such rubric")
"""
ENVIRONMENT = """
class Counting:
    def __init__(self):
        self.turns = 0

    def reset(self, *, options=None):
        return "begin", {}

    def step(self, action):
        self.turns += 1
        return f"turn {self.turns}", 0.5, self.turns == 2, False, {}
"""
AGENT = """
reply = say(messages, max_tokens=3)
say([*messages, reply, {"role": "user", "content": "again"}], max_tokens=3)
"""
ROWS = [{"prompt": f"{number}{number}", "answer": "1"} for number in range(4)]
WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> Iterator[WriteRun]:
    """Return a writer of run files with sections of their own."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def write(*, rows: list[dict[str, Any]] = ROWS, **sections: dict[str, Any]) -> Path:
        data = tmp_path / "rows.jsonl"
        data.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        tree: dict[str, Any] = {
            "run": {"id": "tried", "directory": str(tmp_path / "run"), "samples_per_prompt": 2},
            "model": {"path": str(tiny_model()), "dtype": "float32", "device": "cpu"},
            "data": {"source": f"jsonl:{data}"},
            "engine": {
                "threads": 1,
                "max_context_tokens": 256,
                "sampling": {"max_new_tokens": 6},
            },
            "reward": {"function": "exact_match"},
        }
        for name, keys in sections.items():
            tree[name] = tree.get(name, {}) | keys
        file = tmp_path / "run.json"
        file.write_bytes(orjson.dumps(tree))
        return file

    yield write
    structlog.reset_defaults()


def read(capsys: pytest.CaptureFixture[str]) -> Any:
    (one,) = json.loads(capsys.readouterr().out)
    return one


def test_prompts_are_rendered_generated_and_scored_and_the_run_stays_as_it_was(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(reward={"function": f"{tmp_path / 'rewards.py'}:by_length"})
    try_task(file, prompts=3, output="json")
    played = read(capsys)
    renderer = PromptRenderer.from_folder(tiny_model(), DataConfig(source="http"))
    assert [group["prompt_group_id"] for group in played["prompts"]] == [
        f"000000-000{index}-0" for index in range(3)
    ]
    for group in played["prompts"]:
        assert len(group["samples"]) == 2
        for sample in group["samples"]:
            assert sample["score"]["reward"] == pytest.approx(len(sample["completion"]) / 10)
            assert sample["score"]["components"] == {"length": len(sample["completion"])}
            assert 1 <= sample["num_sampled_tokens"] <= 6
            assert (
                sample["num_prompt_tokens"] + sample["num_sampled_tokens"] == sample["num_tokens"]
            )
    rendered = [
        renderer.completion_text(
            renderer.prompt_tokens([ChatMessage.of_text("user", row["prompt"])]),
            skip_special_tokens=False,
        )
        for row in ROWS
    ]
    assert {group["samples"][0]["prompt"] for group in played["prompts"]} < set(rendered)
    assert played["summary"]["num_samples"] == 6
    assert not (tmp_path / "run").exists()
    try_task(file, prompts=3, output="json")
    texts = [
        [sample["completion"] for group in one["prompts"] for sample in group["samples"]]
        for one in (played, read(capsys))
    ]
    assert texts[0] == texts[1], "the seeds are those of the run"


def test_equal_rewards_errors_of_the_reward_and_cut_off_samples_are_found(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_task(write_run(), "engine.sampling.max_new_tokens=1", prompts=2) == 6
    text = capsys.readouterr().out
    assert (
        "FAIL lengths: 4 of 4 samples were cut off by their length: raise engine.sampling." in text
    )
    assert "FAIL rewards: in 2 of 2 prompt groups all rewards are equal (0)" in text
    assert "prompt as rendered:" in text
    assert "0  ######################################## 4" in text
    file = write_run(reward={"function": f"{tmp_path / 'rewards.py'}:broken"})
    assert try_task(file, prompts=1) == 6
    text = capsys.readouterr().out
    assert "FAIL reward: 2 of 2 samples could not be scored" in text
    assert "no such rubric" in text


def test_environment_talks_with_the_policy_and_its_rewards_count(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counting.py").write_text(ENVIRONMENT)
    file = write_run(
        environment={
            "interface": "gymnasium",
            "function": f"{tmp_path / 'counting.py'}:Counting",
            "max_turns": 4,
        },
        engine={"sampling": {"max_new_tokens": 200}, "max_context_tokens": 512, "threads": 1},
        reward={"function": "environment"},
    )
    try_task(file, prompts=1, samples=8, output="json")
    (group,) = read(capsys)["prompts"]
    assert "stop" in {sample["finish_reason"] for sample in group["samples"]}
    for sample in group["samples"]:
        num_turns = sum(turn["role"] == "assistant" for turn in sample["turns"])
        assert "begin" in sample["prompt"]
        if sample["finish_reason"] == "stop":
            assert [turn["content"] for turn in sample["turns"] if turn["role"] == "user"] == [
                "turn 1"
            ]
            assert num_turns == 2
            assert sample["score"]["reward"] == 1.0
    try_task(file, prompts=1)
    assert "assistant:\n" in capsys.readouterr().out


def test_program_calls_the_model_through_the_gateway(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = list(write_program(tmp_path, AGENT))
    file = write_run(environment={"command": command, "max_turns": 4})
    try_task(file, prompts=1, output="json")
    (group,) = read(capsys)["prompts"]
    assert len(group["samples"]) == 2
    for sample in group["samples"]:
        assert [turn["role"] for turn in sample["turns"]] == ["assistant", "user", "assistant"]
        assert sample["turns"][1]["content"] == "again"
        assert sample["score"]["error"] is None


def test_program_that_fails_is_named_with_what_it_printed(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = list(write_program(tmp_path, "sys.exit('the simulator is gone')"))
    file = write_run(environment={"command": command, "max_turns": 4, "attempts": 1})
    assert try_task(file, prompts=1) == 6
    assert "the simulator is gone" in capsys.readouterr().out


def test_tools_that_the_template_does_not_show_are_found(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    function = {"name": "calc", "description": "adds", "parameters": {"type": "object"}}
    rows = [row | {"tools": [{"type": "function", "function": function}]} for row in ROWS]
    file = write_run(
        rows=rows,
        data={
            "source": f"jsonl:{tmp_path / 'rows.jsonl'}",
            "tools_key": "tools",
            "chat_template_file": str(template),
        },
    )
    with pytest.raises(ConfigError, match="does not show tools"):
        try_task(file, prompts=1)


def test_models_are_compared_in_a_table_with_their_cost(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_model(seed=4)
    try_task(write_run(), prompts=1, model=["run", str(other)], price="1/2")
    text = capsys.readouterr().out
    table = text[text.rindex("model ") :].splitlines()
    assert [line.split()[0] for line in table[1:]] == [str(tiny_model()), str(other)]
    assert all("$0.0" in line for line in table[1:])


def test_interrupt_keeps_what_was_played(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Workbench._finish
    num_finished = 0

    def interrupt(self: Workbench, group: Any) -> Any:
        nonlocal num_finished
        done = finish(self, group)
        num_finished += 1
        if num_finished == 2:
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(Workbench, "_finish", interrupt)
    file = write_run(
        engine={"threads": 1, "max_running_samples": 2, "sampling": {"max_new_tokens": 4}}
    )
    assert try_task(file, prompts=4, output="json") == 130
    played = read(capsys)
    assert played["is_interrupted"]
    assert [len(group["samples"]) for group in played["prompts"]] == [2, 2]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"algorithm": {"name": "sft"}, "run": {"samples_per_prompt": 1}},
            "trains on the completions of the data",
        ),
        ({"parent": {"run": "older", "mode": "replay"}}, "try the run file of that run"),
        (
            {"reward": {"function": "genrm"}, "judge": {"model_path": "judge"}},
            "reward.function=NAME",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_remedy(
    write_run: WriteRun, sections: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        try_task(write_run(**sections), prompts=1)


def test_wrong_model_and_price_are_refused(write_run: WriteRun) -> None:
    with pytest.raises(ConfigError, match="--model nowhere does not exist"):
        try_task(write_run(), prompts=1, model=["nowhere"])
    with pytest.raises(ConfigError, match="PROMPT/COMPLETION"):
        try_task(write_run(), prompts=1, price="cheap")
