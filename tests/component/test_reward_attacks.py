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

import pytest

from relax_events.attacks.completions import completion_attacks
from relax_events.attacks.samples import (
    HONEST,
    IGNORE_TEXTS,
    ROWS,
    TASKS,
    fill,
    fits_a_record,
    generate_samples,
)
from relax_events.plugins import REWARDS, list_installed

pytestmark = [pytest.mark.component, pytest.mark.timeout(900)]

NEED_MORE = {
    "genrm": "a judge's server",
    "genrm_pairwise": "a judge's server",
    "remote": "a service",
    "remote_group": "a service",
    "code": "the sandbox, see test_rewards_code.py and escapes.py",
}
DEADLINE_SECONDS = 30.0
"""A text that takes longer is late; the pool ends its process, as this test does."""


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
        if fits_a_record(text)
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
    assert attack("reasoning_gym", *generate_samples(task), tmp_path) == {}
