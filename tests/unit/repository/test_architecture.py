"""Every file and every name in `docs/architecture.md` exists, and a concept that has one home is built
nowhere else.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
MENTION = re.compile(
    r"`((?:relax_events|workers|docs|tests|schemas|configs)(?:/[\w.-]+)+/?)(?::([\w.]+))?`"
)


def mentions() -> list[tuple[str, str]]:
    """Return each path with the name that a page says it defines, or an empty name."""
    found = {match for page in PAGES for match in MENTION.findall(page.read_text())}
    return sorted(found)


def defines(file: Path, name: str) -> bool:
    """Return whether a module defines `Class`, `function` or `Class.method`."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for part in name.split("."):
        node = next(
            (
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ),
            None,
        )
        if node is None:
            return False
        body = node.body
    return True


def test_architecture_pages_mention_source_files() -> None:
    assert len(mentions()) > 50


@pytest.mark.parametrize(("path", "name"), mentions())
def test_mentioned_file_exists_and_defines_the_mentioned_name(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    assert not name or defines(ROOT / path, name)


TENSOR_FORMAT = {"data_offsets", "weight_map", "*.safetensors", "model.safetensors"}
"""Texts that only who reads or renders a safetensors header or an index needs, or who decides which
files of a folder hold its weights."""


def reads_tensor_files(tree: ast.AST) -> bool:
    """Return whether code reads safetensors files itself or by their library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in TENSOR_FORMAT:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if any(module.partition(".")[0] == "safetensors" for module in modules):
                return True
    return False


@pytest.mark.parametrize(
    "code",
    [
        "import safetensors.torch",
        "from safetensors import safe_open",
        "read_header(folder / 'model.safetensors')",
        "begin, end = entry['data_offsets']",
        "read_model_json(path)['weight_map']",
        "folder.glob('*.safetensors')",
    ],
)
def test_reader_of_tensor_files_is_noticed(code: str) -> None:
    assert reads_tensor_files(ast.parse(code))


def test_one_module_reads_tensor_files() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for folder in ("relax_events", "workers", "compose", "deploy")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if reads_tensor_files(ast.parse(path.read_text()))
    ]
    assert readers == ["relax_events/model_folder/tensors.py"]
