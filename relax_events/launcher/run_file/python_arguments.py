"""Writes the run file of a call of `relax_events.train`, and the files that it names: rows and a
reward function that were passed as Python objects.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tomlkit

from relax_events.config import RunConfig, load_run_config
from relax_events.config.loading import build_run_config
from relax_events.config.session_changes import changes_between
from relax_events.data.row_values import write_object
from relax_events.errors import ConfigError
from relax_events.launcher.run_file.reward_source import name_reward
from relax_events.runtime.run_description import build_run_description
from relax_events.secret_handling import write_private
from relax_events.session.records import find_active
from relax_events.session.resume import refuse_changes

RUN_FILE, ROWS_FILE, DATASET_FILE, REWARD_FILE = (
    "run.toml",
    "rows.jsonl",
    "rows.parquet",
    "reward.py",
)
ANSWER = "answer"
"""The column of the reference answer, unless `data.answer_key` names another; rows of objects may
lack it."""
ORIGIN = "train"
"""Stands for the run file in errors."""
SCHEME = re.compile(r"[a-z_]+:")
Writer = Callable[[Path], object]
Tree = dict[str, Any]


def write_run_file(
    settings: Mapping[str, Any], *, data: Any, reward: Any, accepts_changes: bool
) -> Path:
    """Write a run file into the folder of its run, and return its path.

    A file of rows or of a reward that is there already stays: it must be the same.

    Args:
        settings: By dotted keys, or tables in tables.
        data: A source as a run file names it, the path of a file or folder, rows, or a
            `datasets.Dataset`; None leaves the source to the settings.
        reward: As a run file names it, or a function; None likewise.
        accepts_changes: Take also changes of an earlier run file that change what is trained.
    Raises:
        ConfigError: A key or value is not allowed, an object has no form in a file, or the run is
            there with other rows, another reward or settings that it can't continue with.
    """
    tree = nest_settings(settings)
    run = tree.setdefault("run", {})
    run["directory"] = str(Path(run.get("directory", ".relax")).resolve())
    folder = Path(run["directory"], "runs", str(run.get("id", "")))
    files: dict[str, Writer] = {}
    if data is not None:
        nest_settings({"data.source": name_data(data, folder, files)}, tree)
        if (columns := list_columns(data)) and ANSWER not in columns:
            tree["data"].setdefault("answer_key", "")
    if callable(reward):
        function, text = name_reward(reward, folder / REWARD_FILE)
        nest_settings({"reward.function": function}, tree)
        if text:
            files[REWARD_FILE] = partial(_write_text, text)
    elif reward is not None:
        nest_settings({"reward.function": reward}, tree)
    text = format_toml(tree)
    config = build_run_config(tree, ORIGIN)
    path = folder / RUN_FILE
    if (session := find_active(folder)) is not None:
        raise ConfigError(
            f"run {config.run.id} is running (pid {session.pid} on {session.host}); attach to "
            f"{path}, or take another run_id"
        )
    if path.exists():
        _refuse_other_settings(load_run_config(path), config, accepts_changes=accepts_changes)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, write in files.items():
        _write_file(folder / name, write, run_id=config.run.id)
    write_private(path, text.encode())
    return path


def nest_settings(settings: Mapping[str, Any], tree: Tree | None = None) -> Tree:
    """Return settings by dotted keys as tables, or add them to some. None leaves a key out.

    Raises:
        ConfigError: A key has two values.
    """
    tree = {} if tree is None else tree
    for key, value in settings.items():
        *tables, last = key.split(".")
        table = tree
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{ORIGIN}: {key}: {name} is a value, not a section")
        _merge(table, {last: value}, key)
    return tree


def _merge(table: Tree, values: Mapping[str, Any], key: str) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(table.setdefault(name, {}), dict):
            _merge(table[name], value, key)
        elif value is not None and name in table:
            raise ConfigError(f"{ORIGIN}: {key} is set twice; set it once")
        elif value is not None:
            table[name] = str(value) if isinstance(value, Path) else value


def name_data(data: Any, folder: Path, files: dict[str, Writer]) -> str:
    """Return `data.source` of what was passed as data; add the writer of the file that holds it.

    Raises:
        ConfigError: It is none of the kinds.
    """
    if isinstance(data, str | Path):
        return str(data) if SCHEME.match(str(data)) else name_source(Path(data))
    if type(data).__module__.partition(".")[0] == "datasets":
        if not hasattr(data, "to_parquet"):
            raise ConfigError(
                f"data is a {type(data).__name__}, which has no rows of its own; pass one split as "
                "a datasets.Dataset"
            )
        files[DATASET_FILE] = data.to_parquet
        return f"parquet:{folder / DATASET_FILE}"
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        raise ConfigError(
            f"data must be rows, a datasets.Dataset, or the name of a source, got a "
            f"{type(data).__name__}; pass a list of dicts"
        )
    files[ROWS_FILE] = partial(_write_rows, data)
    return f"jsonl:{folder / ROWS_FILE}"


def list_columns(data: Any) -> list[str]:
    """Return the columns of rows that were passed as objects; none where they are not known before
    they are read.
    """
    if hasattr(data, "column_names"):
        return list(data.column_names)
    first = data[0] if isinstance(data, list | tuple) and data else None
    return list(first) if isinstance(first, Mapping) else []


def name_source(data: Path) -> str:
    """Return `data.source` of a file or a folder.

    Raises:
        ConfigError: It does not exist, or is of another kind.
    """
    if not data.exists():
        raise ConfigError(
            f"data {data} does not exist; give a .jsonl or .parquet file or a folder; a dataset of "
            "the Hugging Face hub is named hf:org/name:config:split"
        )
    if data.is_dir() or data.suffix == ".parquet":
        return f"parquet:{data.resolve()}"
    if not {".jsonl", ".ndjson"} & set(data.suffixes):
        raise ConfigError(
            f"data {data} is neither JSON lines (.jsonl, .jsonl.gz) nor Parquet (.parquet, a "
            "folder); write it as one JSON object a line"
        )
    return f"jsonl:{data.resolve()}"


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, "utf-8")


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"data: row {number} must be a dict of columns, got a {type(row).__name__}"
                )
            file.write(write_object(dict(row), f"data: row {number}", takes_nan=False) + "\n")


def _write_file(path: Path, write: Writer, *, run_id: str) -> None:
    """Write a file that appears when it is whole; one that is there must have the same content."""
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(draft)
        if not path.exists():
            draft.replace(path)
        elif not filecmp.cmp(draft, path, shallow=False):
            what = "reward function" if path.name == REWARD_FILE else "data"
            raise ConfigError(
                f"run {run_id} is there with another {what}, in {path}; take another run_id, or "
                "attach to that run"
            )
    finally:
        draft.unlink(missing_ok=True)


def _refuse_other_settings(old: RunConfig, new: RunConfig, *, accepts_changes: bool) -> None:
    """Refuse changes of a run's settings by the rules that hold when it is resumed."""
    trees = [json.loads(build_run_description(config).config) for config in (old, new)]
    changes = changes_between(old, new, old_tree=trees[0], new_tree=trees[1])
    refuse_changes(new.run.id, changes, is_accepted=accepts_changes)


def format_toml(tree: Mapping[str, Any]) -> str:
    """Return settings as TOML.

    Raises:
        ConfigError: A value has no form in TOML; the text names its key.
    """
    return tomlkit.dumps(_simplify(tree, ""))


def format_value(value: Any, key: str) -> str:
    """Return a value as TOML on one line; errors as for `format_toml`."""
    line = tomlkit.array()  # a list of dicts alone would be written as sections
    line.append(_simplify(value, key))
    return str(line[0].as_string())


def _simplify(value: Any, key: str) -> Any:
    """Return a value with the types that TOML has: texts of paths, lists of tuples."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_simplify(one, key) for one in value]
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        return {name: _simplify(one, f"{prefix}{name}") for name, one in value.items()}
    raise ConfigError(
        f"{ORIGIN}: {key} is a {type(value).__name__}, which a run file can't hold; pass a number, "
        "a text, a list or a dict"
    )
