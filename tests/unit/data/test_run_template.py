"""The chat template of a run: its text travels on the log, and a changed text is a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_settings import small_run

from relax_events.config import RunConfig
from relax_events.config.resume_rules import Rule
from relax_events.data.rendering import read_run_template
from relax_events.errors import ConfigError
from relax_events.models.tokenizer_folder import read_folder_template
from relax_events.runtime.run_description import build_run_description
from relax_events.session.resume import find_changes, find_template_changes, refuse_changes

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


def make_run(folder: Path, **data: Any) -> RunConfig:
    """Return a run whose model's template is `folder's`."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "folder's"}))
    data = {"source": "jsonl:unused"} | data
    return small_run({"run": {"id": "templates"}, "model": {"path": model}, "data": data})


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, ""),
        ({"tokenizer_config.json": "{}"}, ""),
        ({"tokenizer_config.json": json.dumps({"chat_template": "a"})}, "a"),
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMED})}, "plain"),
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMED[:1]})}, ""),
        ({"chat_template.jinja": "b"}, "b"),
        ({"tokenizer_config.json": '{"chat_template": "a"}', "chat_template.jinja": "b"}, "b"),
    ],
)
def test_folder_has_the_template_that_loaders_choose(
    files: dict[str, str], template: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_folder_template(tmp_path) == template
    assert read_folder_template(tmp_path / "missing") == ""


def test_a_run_has_the_template_that_renders_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own")
    for data, template in (
        ({}, "folder's"),
        ({"chat_template_file": file}, "own"),
        ({"chat_template": False}, ""),
    ):
        config = make_run(tmp_path, **data)
        assert read_run_template(config.data, config.model.path) == template


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    (config.model.path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the chat template of .*model can't be read"):
        read_run_template(config.data, config.model.path)


@given(old=st.text(max_size=20), new=st.text(max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_another_text_under_the_same_name_needs_consent(old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(new, newline="")
    config = make_run(tmp_path, chat_template_file=file)
    described = build_run_description(config, chat_template=old)
    assert find_changes(described, config) == []
    changes = find_template_changes(described, config)
    if not old or not new or old == new:
        assert changes == []
        return
    (change,) = changes
    assert (change.key, change.rule) == ("data.chat_template_file", Rule.ACCEPTED)
    assert str(change).count("text ") == 2
    with pytest.raises(ConfigError, match=r"data\.chat_template_file: text "):
        refuse_changes("templates", changes, is_accepted=False)
