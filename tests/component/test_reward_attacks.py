"""No text of a model, and no text of a row, does anything in a verifier but get a score."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.attacks.completions import completion_attacks
from relax_events.config import DataConfig
from relax_events.data.sources import open_source
from relax_events.plugins import REWARDS, list_installed

pytestmark = [pytest.mark.component, pytest.mark.timeout(900)]

NEED_MORE = {
    "genrm": "a judge's server",
    "genrm_pairwise": "a judge's server",
    "remote": "a service",
    "remote_group": "a service",
    "code": "the sandbox, see test_rewards_code.py and escapes.py",
}
IGNORE_TEXTS = ("environment",)
"""Give the environment's rewards, whatever the completion is."""
DEADLINE_SECONDS = 30.0
"""A text that takes longer is late; the pool ends its process, as this test does."""
TASKS = [
    "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting",
    "countdown", "puzzle24", "simple_integration", "polynomial_multiplication",
    "bitwise_arithmetic", "spell_backward",
]  # fmt: skip
"""Those whose verifiers evaluate a text, and one that compares."""
PAYLOAD = "PAYLOAD"


def case(completion: str, answer: str = "87", metadata: Any = None, **more: Any) -> dict[str, Any]:
    return {"completion": completion, "answer": answer, "metadata": metadata or {}, **more}


def followed(instruction: str, **arguments: Any) -> dict[str, Any]:
    return {"instruction_id_list": [instruction], "kwargs": [arguments]}


FORMED = "<think>a</think><answer>{}</answer>"
HONEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact_match": (case("87"), case("86")),
    "squad_exact_match": (case("<answer>87</answer>"), case("<answer>86</answer>")),
    "f1": (case("<answer>87</answer>"), case("<answer>86</answer>")),
    "gsm8k": (case("#### 87"), case("#### 86")),
    "math": (case(r"\boxed{87}"), case(r"\boxed{86}")),
    "deepscaler": (case(r"</think>\boxed{87}"), case(r"</think>\boxed{86}")),
    "dapo_math": (case("Answer: 87"), case("Answer: 86")),
    "geo3k": (
        case(r"<think>a</think> \boxed{87}"),
        case(r"<think>a</think> \boxed{86}"),
    ),
    "openr1_multimodal": (case(FORMED.format(87)), case(FORMED.format(86))),
    "gpqa": (case("Answer: B", "B"), case("Answer: A", "B")),
    "multiple_choice": (case("<answer>B</answer>", "B"), case("<answer>A</answer>", "B")),
    "ifeval": (
        case("a zebra", metadata=followed("keywords:existence", keywords=["zebra"])),
        case("a", metadata=followed("keywords:existence", keywords=["zebra"])),
    ),
    "ifbench": (
        case("a zebra", metadata=followed("keywords:existence", keywords=["zebra"])),
        case("a", metadata=followed("keywords:existence", keywords=["zebra"])),
    ),
    "environment": (
        case("a", environment_rewards=[1.0]),
        case("a", environment_rewards=[0.0]),
    ),
    "nim": (
        case("1", metadata={"options": {"stones": 1}}),
        case("1", metadata={"options": {"stones": 2}}),
    ),
    "deepeyes": (case("<answer>87</answer>"), case("<answer>86</answer>")),
}
"""For each reward a right and a wrong sample."""
ROWS: dict[str, list[Any]] = {
    "gpqa": [{"correct_letter": PAYLOAD}, {"choices": [PAYLOAD, "b"]}],
    "ifeval": [
        followed(PAYLOAD),
        followed("keywords:existence", keywords=[PAYLOAD]),
        followed("keywords:frequency", keyword=PAYLOAD, frequency=1, relation="at least"),
        followed("startend:end_checker", end_phrase=PAYLOAD),
        followed("language:response_language", language=PAYLOAD),
    ],
    "nim": [{"options": {"stones": PAYLOAD}}],
}
"""For some rewards metadata with a place for a payload."""


def generated(task: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return a right and a wrong sample of a reasoning-gym task, and rows with a place."""
    row = open_source(DataConfig(source=f"reasoning_gym:{task}", num_problems=1), seed=3).row(0)
    metadata = orjson.loads(row.metadata)
    entry = metadata["entry"]
    rows = [
        {**metadata, "entry": {**entry, "answer": PAYLOAD}},
        {**metadata, "entry": replace_texts(entry)},
    ]
    return case(entry["answer"], "", metadata), case("wrong", "", metadata), rows


def replace_texts(value: Any) -> Any:
    if isinstance(value, str):
        return PAYLOAD
    if isinstance(value, list):
        return [replace_texts(part) for part in value]
    if isinstance(value, dict):
        return {key: replace_texts(part) for key, part in value.items()}
    return value


def fill(value: Any, payload: str) -> Any:
    if value == PAYLOAD:
        return payload
    if isinstance(value, list):
        return [fill(part, payload) for part in value]
    if isinstance(value, dict):
        return {key: fill(part, payload) for key, part in value.items()}
    return value


def is_json(text: str) -> bool:
    try:
        orjson.dumps(text)
    except orjson.JSONEncodeError:  # a lone surrogate never gets into a record
        return False
    return True


class Listener:
    """A listening socket; `num_connections` counts who connected."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]

    def count(self) -> int:
        num = 0
        while True:
            try:
                self.socket.accept()[0].close()
            except BlockingIOError:
                return num
            num += 1


@contextmanager
def scorer(setup: dict[str, Any]) -> Iterator[queue.Queue[str | None]]:
    """Run the program; yield its lines, then None."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.reward_attacks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    output = process.stdout

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        process.stdin.write(json.dumps(setup))
        process.stdin.close()
        yield lines
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        output.close()


def run_cases(setup: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Score all cases; those that are late have an empty result."""
    results: dict[str, dict[str, Any]] = {}
    while waiting := {name: c for name, c in setup["cases"].items() if name not in results}:
        current, events = "", list[str]()
        with scorer(setup | {"cases": waiting}) as lines:
            while True:
                try:
                    line = lines.get(timeout=DEADLINE_SECONDS if current else None)
                except queue.Empty:
                    break
                if line is None:
                    events.append("ended the process")
                    break
                read = json.loads(line)
                current = read.get("begins", current)
                if "name" in read:
                    results[read["name"]] = read
        if current not in results:
            results[current] = {"events": events} if events else {}
    return results


def attack(
    function: str, right: Any, wrong: Any, rows: list[Any], folder: Path
) -> dict[str, list[str]]:
    """Return what each text did that it must not."""
    canary, listener = folder / "canary", Listener()
    payloads = {
        name: text
        for name, text in completion_attacks(canary, port=listener.port).items()
        if is_json(text)
    }
    cases = {f"completion: {name}": right | {"completion": text} for name, text in payloads.items()}
    cases |= {f"answer: {name}": right | {"answer": text} for name, text in payloads.items()}
    cases |= {
        f"row {number}: {name}": right | {"metadata": fill(row, text)}
        for number, row in enumerate(rows)
        for name, text in payloads.items()
    }
    first = run_cases({"function": function, "right": right, "wrong": wrong, "cases": {"": right}})
    best, worst = first[""]["right"], first[""]["wrong"]
    assert best > worst
    results = run_cases({"function": function, "right": right, "wrong": wrong, "cases": cases})
    assert results.keys() == cases.keys()
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        problems = list(result.get("events", ()))
        if "score" in result and (result["right"], result["wrong"]) != (best, worst):
            problems.append(f"later scores are {result['right']} and {result['wrong']}")
        is_completion = name.startswith("completion") and function not in IGNORE_TEXTS
        if is_completion and result.get("score") == best:
            problems.append("got the score of a right answer")
        if problems:
            found[name] = problems
    if canary.exists():
        found["canary"] = ["exists"]
    if listener.count():
        found["listener"] = ["was connected to"]
    listener.socket.close()
    return found


def test_every_reward_is_attacked() -> None:
    assert {*HONEST, *NEED_MORE, "reasoning_gym"} == set(list_installed(REWARDS))


@pytest.mark.parametrize("function", sorted(HONEST))
def test_text_does_nothing_in_a_reward(function: str, tmp_path: Path) -> None:
    right, wrong = HONEST[function]
    assert attack(function, right, wrong, ROWS.get(function, []), tmp_path) == {}


@pytest.mark.parametrize("task", TASKS)
def test_text_does_nothing_in_a_generated_task(task: str, tmp_path: Path) -> None:
    assert attack("reasoning_gym", *generated(task), tmp_path) == {}
