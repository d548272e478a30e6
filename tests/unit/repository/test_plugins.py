"""Plugins by name and by file."""

from __future__ import annotations

import os
import py_compile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from relax_events.errors import ConfigError
from relax_events.plugins import ENGINES, PAGES, find_plugin, load_installed

pytestmark = pytest.mark.unit
SOURCE = """
from __future__ import annotations

from dataclasses import dataclass

import sibling


@dataclass
class Mine:
    speed: int = sibling.SPEED
"""


def test_find_plugin_returns_an_installed_entry_point_without_loading_it() -> None:
    found = find_plugin(ENGINES, "transformers", what="engine.name = 'transformers'")
    assert isinstance(found, EntryPoint)
    assert found.value == "relax_events.engines.transformers.engine:TransformersEngine"


def test_find_plugin_loads_a_class_from_a_file_with_its_sibling_modules(tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("SPEED = 3\n")
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    assert find_plugin(ENGINES, f"{file}:Mine", what="engine.name").load()().speed == 3


def test_plugin_file_is_loaded_from_source_despite_stale_bytecode(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    speed = 3\n")
    py_compile.compile(str(file))
    compiled = file.stat()
    file.write_text("class Mine:\n    speed = 7\n")
    os.utime(file, ns=(compiled.st_atime_ns, compiled.st_mtime_ns))
    assert find_plugin(ENGINES, f"{file}:Mine", what="engine.name").load().speed == 7


def test_find_plugin_runs_nothing_before_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('not yet')\n")
    found = find_plugin(ENGINES, f"{file}:Mine", what="engine.name = 'broken'")
    with pytest.raises(
        ConfigError,
        match=r"engine.name = 'broken' .*broken.py failed to load: RuntimeError: not yet",
    ):
        found.load()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "vroom",
            "engine.name = 'it' is not installed; installed are dataset, sglang, transformers",
        ),
        (
            "nowhere/mine.py:Mine",
            r"engine.name = 'it': file nowhere/mine.py does not exist in the working directory .*; give path/to/file.py:Class",
        ),
    ],
)
def test_find_plugin_lists_available_plugins_for_an_unknown_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_plugin(ENGINES, name, what="engine.name = 'it'")


def test_plugin_lists_the_classes_of_a_file_for_an_unknown_class_name(
    tmp_path: Path,
) -> None:
    file = tmp_path / "other.py"
    file.write_text("class Other: pass\n")
    with pytest.raises(
        ConfigError, match=r"engine.name: .*other.py has no class 'Mine', only Other"
    ):
        find_plugin(ENGINES, f"{file}:Mine", what="engine.name").load()


def test_installed_plugins_without_their_files_are_left_out_and_other_failures_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "page_of_a_test.py").write_text("def offer(): ...\n")
    (tmp_path / "page_without_its_import.py").write_text("import a_missing_package\n")
    entries = {
        name: EntryPoint(name, f"{name}:offer", PAGES)
        for name in ("page_of_a_test", "deleted_package.page", "page_without_its_import")
    }
    broken = entries.pop("page_without_its_import")
    monkeypatch.setattr("relax_events.plugins.list_installed", lambda group: entries)
    assert [offer.__name__ for offer in load_installed(PAGES)] == ["offer"]
    entries[broken.name] = broken
    with pytest.raises(ModuleNotFoundError, match="a_missing_package"):
        load_installed(PAGES)
