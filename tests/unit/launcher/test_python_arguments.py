"""The run file of a call of `train`: settings, rows and a reward function as files of the run."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relax_events.config import load_run_config
from relax_events.data.jsonl import JsonlSource
from relax_events.errors import ConfigError
from relax_events.events.json_text import parse_json
from relax_events.launcher.run_file.python_arguments import (
    format_toml,
    format_value,
    nest_settings,
    write_run_file,
)
from relax_events.launcher.run_file.reward_source import name_reward
from relax_events.rewards.registry import load_reward

ROWS: list[dict[str, Any]] = [
    {"prompt": "two", "answer": "2", "large": 2**70, "nothing": None},
    {"prompt": "drei\u2028🙂", "answer": "3", "large": -(2**64) - 1, "nothing": None},
]


def contains(completion: str, *, answer: str) -> float:
    return float(answer in completion)


def write(folder: Path, *, data: Any = ROWS, reward: Any = contains, **settings: Any) -> Path:
    given = {
        "run.id": "mine",
        "run.directory": folder / ".relax",
        "model.path": folder / "model",
    } | settings
    return write_run_file(given, data=data, reward=reward, accepts_changes=False)


def test_run_file_holds_settings_rows_and_the_reward_of_an_importable_function(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        trainer={"learning_rate": 1e-5},
        **{"engine.sampling.max_new_tokens": 8, "run.mode": None},
    )
    config = load_run_config(path, environment={})
    assert path == tmp_path / ".relax/runs/mine/run.toml"
    assert config.run_directory == path.parent
    assert (config.trainer.learning_rate, config.run.mode) == (1e-5, "async")
    assert config.engine.sampling.max_new_tokens == 8
    assert config.reward.function == f"{Path(__file__)}:contains"
    rows = JsonlSource(Path(config.data.source.removeprefix("jsonl:")), config.data)
    assert [parse_json(rows.row(index).metadata) for index in range(2)] == [
        {"large": row["large"], "nothing": None} for row in ROWS
    ]
    assert [rows.row(index).messages[0].text for index in range(2)] == ["two", "drei\u2028🙂"]


@pytest.mark.parametrize("key", ["", "solution"])
def test_rows_without_an_answer_leave_it_out_unless_a_column_is_named(
    tmp_path: Path, key: str
) -> None:
    settings = {"data.answer_key": key or None}
    path = write(tmp_path, data=[{"prompt": "2 + 2", "solution": 4}], **settings)
    config = load_run_config(path, environment={})
    assert config.data.answer_key == key
    row = JsonlSource(Path(config.data.source.removeprefix("jsonl:")), config.data).row(0)
    assert (row.answer, parse_json(row.metadata)) == (("4", {}) if key else ("", {"solution": 4}))


def test_toml_keeps_every_value() -> None:
    tree = {
        "a": {
            "text": 'quote " and \\ and \x7f and \x00 🙂',
            "large": 2**70,
            "small": 1e-05,
            "infinite": math.inf,
            "is": True,
            "list": [1, [2.5, "x"], {"a b": "c"}],
            "table": {"dotted.key": 1, "empty": {}},
        },
        "b c": {},
    }
    assert tomllib.loads(format_toml(tree)) == tree


def test_dotted_keys_and_tables_are_the_same_settings_and_inner_keys_keep_their_dots() -> None:
    assert nest_settings(
        {"broker.client": {"a.b": 1}, "broker": {"acks": None}, "run.seed": 2}
    ) == {
        "broker": {"client": {"a.b": 1}},
        "run": {"seed": 2},
    }


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"trainer.learning_rat": 1e-5},
            "train: unknown key trainer.learning_rat; did you mean tr",
        ),
        ({"lr": 1}, "train: unknown key lr"),
        ({"trainer.learning_rate": object()}, "train: trainer.learning_rate is a object, which"),
        ({"run": {"id": "other"}}, "train: run is set twice"),
        ({"run.id": "../x"}, "train: run.id must match "),
        ({"data": 5}, "data must be rows, a datasets.Dataset, or the name of a source, got a int"),
        ({"data": [1]}, "data: row 0 must be a dict of columns, got a int"),
        ({"data": [{"prompt": {1, 2}}]}, "data: row 0: prompt holds a set, which JSON can't"),
        ({"data": "rows.jsonl"}, "data rows.jsonl does not exist"),
    ],
)
def test_wrong_argument_is_named(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        write(tmp_path, **settings)
    assert not list(tmp_path.rglob("run.toml"))


def test_same_call_keeps_the_files_and_other_rows_or_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = write(tmp_path, **{"run.num_steps": 200})
    rows = path.with_name("rows.jsonl")
    before = (path.read_bytes(), rows.read_bytes(), rows.stat().st_ino)
    assert write(tmp_path, **{"run.num_steps": 200}) == path
    longer = {"run.num_steps": 200}
    with pytest.raises(ConfigError, match=r"mine is there with another data, in .*rows\.jsonl"):
        write(tmp_path, data=ROWS[:1], **longer)
    with pytest.raises(ConfigError, match=r"run\.seed: 0 -> 5"):
        write(tmp_path, **longer, **{"run.seed": 5})
    with pytest.raises(ConfigError, match=r"accept-changes.*\n.*trainer\.learning_rate"):
        write(tmp_path, **longer, **{"trainer.learning_rate": 0.5})
    assert (path.read_bytes(), rows.read_bytes(), rows.stat().st_ino) == before
    assert not list(path.parent.glob(".*"))


NOTEBOOK = """
import json
import math as arithmetic
import re
from collections import Counter
from relax_events.api.rewards import reward
from helper_of_notebook import HALF

ANSWER = re.compile("=(.*)", re.I)
WEIGHTS = {"a": [1, 2.5], "b": None}

class Parts:
    least = HALF

def parse(text):
    return ANSWER.search(text) or score

def unused():
    return nothing

@reward(source="mine")
def score(completion, *, answer, scale: float = WEIGHTS["a"][1]):
    json.dumps(Counter(completion))
    part = parse(completion)
    return arithmetic.sqrt(scale) + Parts.least + (part is not score and part[1] == answer)

async def later(completion):
    return 1.0
"""


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module like a notebook's `__main__`, whose source is known by cells."""
    cells = tmp_path / "cells"
    cells.mkdir()
    (cells / "helper_of_notebook.py").write_text("HALF = 0.5\n")
    (cells / "notebook_cells.py").write_text(NOTEBOOK)
    monkeypatch.syspath_prepend(str(cells))
    module = importlib.import_module("notebook_cells")
    monkeypatch.delitem(sys.modules, "notebook_cells")
    module.__name__ = "__main__"
    for value in vars(module).values():
        if getattr(value, "__module__", "") == "notebook_cells":
            value.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_function_of_a_notebook_is_written_with_what_it_uses(
    tmp_path: Path, notebook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reward.py"
    name, text = name_reward(notebook.score, file)
    file.write_text(text)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "cells" not in one])
    monkeypatch.delitem(sys.modules, "helper_of_notebook")
    loaded = load_reward(name)
    assert loaded.function("= 4", answer=" 4") == 2.5**0.5 + 0.5 + 1
    assert "unused" not in text
    assert name_reward(notebook.later, file)[1].endswith("return 1.0\n")


def test_function_of_a_package_is_imported_by_the_file(tmp_path: Path) -> None:
    package = tmp_path / "elsewhere" / "grading_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("POINTS = 3.0\n")
    (package / "rules.py").write_text(
        "from .parts import POINTS\ndef grade(completion):\n    return POINTS\n"
    )
    sys.path.append(str(package.parent))
    function = importlib.import_module("grading_package.rules").grade
    sys.path.remove(str(package.parent))
    file = tmp_path / "reward.py"
    name, text = name_reward(function, file)
    file.write_text(text)
    for module in ("grading_package", "grading_package.parts", "grading_package.rules"):
        del sys.modules[module]
    assert load_reward(name).function("x") == 3.0


def test_function_that_no_other_process_can_have_is_refused(
    tmp_path: Path, notebook: ModuleType
) -> None:
    bonus = 2.0

    def with_closure(completion: str) -> float:
        return bonus

    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(completion):\n    return 1.0\n", namespace)
    notebook.HALF = json.JSONDecoder()  # type: ignore[attr-defined]
    cases = [
        (lambda completion: 1.0, r"it is a lambda; define it by def"),
        (with_closure, r"with_closure uses bonus of the function around it"),
        (print, r"it is a builtin_function_or_method"),
        (namespace["typed"], r"the source of typed is in no file or cell"),
        (notebook.score, r"it uses HALF, a JSONDecoder, which has no text"),
    ]
    for function, text in cases:
        with pytest.raises(ConfigError, match=f"{text}.*path/to/file.py:"):
            name_reward(function, tmp_path / "reward.py")


@pytest.mark.parametrize(
    "value",
    [3, "a 'text'", True, [1, 2.5], [{"a": 1}, {"b": [{"c": "x"}]}], [["x"], []], {"a": {"b": 1}}],
)
def test_a_value_on_the_command_line_is_one_line_that_reads_as_the_value(value: object) -> None:
    text = format_value(value, "key")
    assert "\n" not in text
    assert tomllib.loads(f"key = {text}") == {"key": value}
