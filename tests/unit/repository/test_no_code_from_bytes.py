"""No input becomes code: no pickle in any form, no eval, no remote code, no queues between
processes that pickle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = sorted(
    path for folder in ("relax_events", "workers") for path in (ROOT / folder).rglob("*.py")
)
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "multiprocessing",
    "yaml",
    "jsonpickle",
}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "hub"),
    ("np", "load"),
    ("numpy", "load"),
    ("dist", "all_gather_object"),
    ("dist", "gather_object"),
    ("dist", "broadcast_object_list"),
    ("dist", "send_object_list"),
    ("dist", "recv_object_list"),
}
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "read_pickle",
    "to_pickle",
    "all_gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
RUNS_TESTS = {"relax_events/sandbox/inside/run_tests.py": ["compile()", "exec()", "exec()"]}
"""The data's tests are programs; they run isolated in the sandbox, in a process of their
own."""


def findings(tree: ast.AST) -> Iterator[str]:
    """Yield each way in which this code could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in ATTRIBUTES or node.attr in METHODS:
                yield f"{owner}.{node.attr}"


def _of_call(node: ast.Call) -> Iterator[str]:
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield f"{node.func.id}()"
    for keyword in node.keywords:
        is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ("trust_remote_code", "allow_pickle") and not is_false:
            yield f"{keyword.arg}="


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import multiprocessing.pool",
        "torch.load(path)",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
        "Model.from_pretrained(path, trust_remote_code=True)",
        "Model.from_pretrained(path, trust_remote_code=config.trust)",
        "socket.recv_pyobj()",
        "torch.distributed.all_gather_object(out, mine)",
    ],
)
def test_code_execution_check_finds_unsafe_calls(code: str) -> None:
    assert list(findings(ast.parse(code))) != []


@pytest.mark.parametrize(
    "code",
    [
        "re.compile(pattern)",
        "model.eval()",
        "Model.from_pretrained(path, trust_remote_code=False)",
        "store.load(step)",
    ],
)
def test_code_execution_check_accepts_safe_code(code: str) -> None:
    assert list(findings(ast.parse(code))) == []


def test_product_never_executes_data_it_reads() -> None:
    assert len(PRODUCT) > 100
    found = {
        str(path.relative_to(ROOT)): list(findings(ast.parse(path.read_text()))) for path in PRODUCT
    }
    assert {path: names for path, names in found.items() if names} == RUNS_TESTS
