"""Within the guard a text is data: it is neither run nor does it change what a library says."""

from __future__ import annotations

import ast
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.data.sources import create_task
from relax_events.packages.verifiers.text_guard import guard_texts

pytestmark = pytest.mark.component
TASKS = [
    "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting", "puzzle24",
    "countdown", "simple_integration", "intermediate_integration", "polynomial_multiplication",
    "bitwise_arithmetic",
]  # fmt: skip
"""Those of reasoning-gym 0.1.25 whose verifier evaluates a text."""
NUM_PROBLEMS = 10


def write_variants(answer: str, order: random.Random) -> Iterator[str]:
    """Yield right and wrong answers as models write them."""
    rows = [line.split() for line in answer.split("\n")]
    characters = list(answer)
    order.shuffle(characters)
    yield from (answer, f"({answer})", f"[{answer}]", f"{answer} + C", f"{answer}*1")
    yield from (repr(list(answer)), repr(answer.split()), repr(rows), orjson.dumps(rows).decode())
    yield repr([[int(part) if part.isdigit() else part for part in row] for row in rows])
    yield from ("".join(characters), answer[:-1], answer.replace(" ", ""), answer.replace("+", "-"))
    yield from (f"The answer is {answer}", f"2*({answer})", f"{answer} + 1", "x", "1 + 2", "[]")


@pytest.mark.parametrize("name", TASKS)
def test_guard_keeps_the_score_of_each_answer(name: str) -> None:
    task = create_task(name, size=NUM_PROBLEMS, seed=4711)
    scores = set()
    for entry in map(task.__getitem__, range(NUM_PROBLEMS)):
        for text in write_variants(str(entry["answer"]), random.Random(entry["answer"])):
            expected = task.score_answer(text, entry)
            with guard_texts():
                assert task.score_answer(text, entry) == expected, text
            scores.add(expected)
    assert len(scores) > 1


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: eval("len('a')"),
        lambda folder: eval("folder"),
        lambda folder: exec("a = 1"),
        lambda folder: compile("a.b", "<string>", "eval"),
        lambda folder: compile(ast.parse("a.b"), "<string>", "exec"),
    ],
)  # fmt: skip
def test_guard_refuses_a_compilation(act: Callable[[Path], Any], tmp_path: Path) -> None:
    with guard_texts(), pytest.raises(SyntaxError):
        act(tmp_path)
    act(tmp_path)


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: (folder / "a").write_text("x"),
        lambda folder: os.open(folder / "a", os.O_CREAT | os.O_RDWR),
        lambda folder: (folder / "b").mkdir(),
        lambda folder: folder.rename(folder / "c"),
        lambda folder: os.system("true"),
        lambda folder: os.fork(),
        lambda folder: subprocess.run(["true"], check=True),
        lambda folder: socket.create_connection(("127.0.0.1", 9)),
        lambda folder: sys.settrace(None),
    ],
)  # fmt: skip
def test_guard_refuses_effects(act: Callable[[Path], Any], tmp_path: Path) -> None:
    with guard_texts(), pytest.raises(PermissionError, match="which is refused"):
        act(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_guard_lets_libraries_read_and_import(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    (tmp_path / "late_module.py").write_text("VALUE = eval('len([1])')\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with guard_texts():
            assert (tmp_path / "data").read_text() == "x"
            from late_module import VALUE  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("late_module", None)
    assert VALUE == 1


def test_guard_ends_with_its_context() -> None:
    with pytest.raises(KeyError), guard_texts():
        raise KeyError
    assert eval("len('a')") == 1


def test_guard_within_a_guard_keeps_the_outer_one() -> None:
    with guard_texts():
        with guard_texts():
            pass
        with pytest.raises(SyntaxError, match="the text"):
            eval("len('a')")
