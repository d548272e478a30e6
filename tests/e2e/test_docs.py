"""The documentation's examples work: run files load, commands and arguments exist, code runs, links
resolve.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from relax_events.cli.app import app
from relax_events.config import RunConfig, load_run_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
REQUIRED: dict[str, Any] = {
    "run": {"id": "documented"},
    "model": {"path": "model"},
    "data": {"source": "jsonl:rows"},
}


def blocks(language: str) -> Iterator[Any]:
    """Yield each code block of a language, named by its page and line."""
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            if found[1] == language:
                line = text.count("\n", 0, found.start()) + 1
                yield pytest.param(found[2], id=f"{page.relative_to(ROOT)}:{line}")


def commands() -> Iterator[Any]:
    """Yield each command line of the bash blocks, without what leads to it and what comments on
    it."""
    for block in blocks("bash"):
        for line in block.values[0].splitlines():
            for command in line.split("&&"):
                if words := shlex.split(command, comments=True):
                    yield pytest.param(words, id=f"{block.id} {' '.join(words)}")


def test_documentation_has_code_to_check() -> None:
    assert [list(blocks(language)) != [] for language in ("bash", "toml", "python")] == [
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("block", list(blocks("toml")))
def test_toml_block_is_valid_in_a_run_file(block: str) -> None:
    tree = tomllib.loads(block)
    whole = {name: REQUIRED.get(name, {}) | tree.get(name, {}) for name in REQUIRED | tree}
    if "datasets" in whole["data"]:  # which replace the one source
        del whole["data"]["source"]
    RunConfig.model_validate(whole)


@pytest.mark.parametrize("words", list(commands()))
def test_documented_command_exists_with_its_arguments(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", Path("Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    if words[0] == "relax":
        command, bound, _ = app.parse_args(words[1:], print_error=False, exit_on_error=False)
        config = bound.arguments.get("config")
        assert signature(command).parameters.keys() >= bound.arguments.keys()
        if isinstance(config, Path) and not config.is_relative_to(
            ".relax"
        ):  # an earlier command wrote the files there
            load_run_config(config, bound.arguments.get("overrides", ()), environment={})


@pytest.mark.parametrize("block", list(blocks("python")))
def test_python_block_runs(block: str) -> None:
    exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    assert [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ] == []


def test_reference_pages_match_the_code() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
