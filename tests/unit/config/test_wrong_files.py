"""A file of another kind that is given as a run file is named for what it is, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_events.config import load_run_config
from relax_events.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.jsonl", "{}", "holds rows of data and is no run file; give a run file, in TOML"),
        ("rows.csv", "a,b", "holds rows of data"),
        ("model.safetensors", "", "holds weights and is no run file; .* whose model.path"),
        ("mine.py", "", r'is Python .* reward.function, .* = ".*mine.py:FUNCTION"'),
        ("verl.yaml", "a: 1", "is YAML and no run file; run files are TOML"),
        ("rows.json", '[{"prompt": "a"}]', "holds a list of rows .* one object a line"),
        ("report.json", '{"run_id": "q", "curves": {}}', "is the report of run q .*run.json"),
        ("config.json", '{"model_type": "qwen3"}', "is a model's configuration"),
        ("pyproject.toml", "[project]\n[build-system]\n", "is a Python project"),
    ],
)
def test_file_of_another_kind_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: str, text: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=text):
        load_run_config(tmp_path / name)


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("config.json", "is a model's folder .* whose model.path names it; .* relax init"),
        ("run.json", "is a run's folder; its run file as resolved is .*run.json"),
        ("mine.toml", "is a folder .* give one of its files: mine.toml"),
        ("other.txt", "is a folder .* give a file; for example configs/quickstart.toml"),
    ],
)
def test_folder_is_refused_with_what_to_do(tmp_path: Path, inside: str, text: str) -> None:
    (tmp_path / inside).write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=text):
        load_run_config(tmp_path)
