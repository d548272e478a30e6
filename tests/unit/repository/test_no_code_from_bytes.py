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
LOADERS = {
    "FileSystemReader": "torch.distributed.checkpoint: pickle in .metadata",
    "DefaultLoadPlanner": "torch.distributed.checkpoint: torch.load without weights_only",
    "dist_checkpointing.load": "megatron-core: pickle in .metadata",
    "dist_checkpointing.load_common_state_dict": "megatron-core: torch.load of common.pt",
    "dist_checkpointing.load_plain_tensors": "megatron-core: pickle in .metadata",
    "dist_checkpointing.load_tensors_metadata": "megatron-core: pickle in .metadata",
    "dist_cp.load": "torch.distributed.checkpoint: pickle in .metadata",
    "dcp.load": "torch.distributed.checkpoint: pickle in .metadata",
    "dcp_to_torch_save": "torch.distributed.checkpoint: pickle in .metadata",
    "load_state_dict_from_url": "torch.hub: torch.load",
    "jit.load": "torch: an archive with code",
    "package.PackageImporter": "torch: an archive with code",
    "PackageImporter": "torch: an archive with code",
    "zarr.open": "zarr: object arrays are pickles",
    "load_from_checkpoint": "lightning: torch.load",
    "sympify": "sympy: eval of a text",
    "parse_expr": "sympy: eval of a text",
    "lambdify": "sympy: exec of an expression",
    "score_answer": "reasoning-gym: eval of a completion",
}
"""Calls of libraries that unpickle or evaluate what they read, and by which part."""
LOADER_MODULES = {
    "torch.distributed.checkpoint": {"load", "load_state_dict"},
    "megatron.core.dist_checkpointing": {"load", "load_common_state_dict", "load_plain_tensors"},
}
EXCEPTIONS = {
    "relax_events/attacks/probe_child.py": ["eval()"],
    "relax_events/sandbox/inside/run_tests.py": ["compile()", "exec()", "exec()"],
    "relax_events/packages/megatron/foreign_checkpoint/records.py": ["pickle"],
    "relax_events/packages/megatron/foreign_checkpoint/loading.py": [
        "megatron.core.dist_checkpointing.load",
        "FileSystemReader",
    ],
    "relax_events/packages/verifiers/math_plain_syntax.py": ["parse_expr"],
    "relax_events/packages/verifiers/reasoning_gym.py": ["score_answer"],
}
"""Our own attacks are run inside of each confinement profile. The data's tests are programs; they run isolated in the sandbox, in a process of their own.
Records of a foreign pickle do nothing, and a foreign checkpoint is loaded with a checked reader.
A mathematical answer is parsed after its tokens were checked.
"""


def findings(tree: ast.AST) -> Iterator[str]:
    """Yield each way in which this code could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from _of_import(node)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in ATTRIBUTES or node.attr in METHODS:
                yield f"{owner}.{node.attr}"
            elif {node.attr, f"{_last_name(node.value)}.{node.attr}"} & LOADERS.keys():
                yield node.attr


def _of_import(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    if module.split(".")[0] in MODULES:
        yield f"from {module}"
    for alias in node.names:
        if alias.name in LOADER_MODULES.get(module, ()):
            yield f"{module}.{alias.name}"
        elif alias.name in LOADERS:
            yield alias.name


def _last_name(node: ast.expr) -> str:
    """Return the last name of a dotted expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


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
        "from torch.distributed.checkpoint import FileSystemReader",
        "from torch.distributed.checkpoint import load",
        "torch.distributed.checkpoint.FileSystemReader(path)",
        "from megatron.core.dist_checkpointing import load",
        "dist_checkpointing.load(state, path)",
        "megatron.core.dist_checkpointing.load(state, path)",
        "dcp.load(state)",
        "torch.jit.load(path)",
        "from sympy import sympify",
        "sympy.parse_expr(text)",
        "task.score_answer(completion, entry)",
        "zarr.open(path)",
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
        "from megatron.core.dist_checkpointing import save",
        "safetensors.torch.load(content)",
        "source.load(path)",
    ],
)
def test_code_execution_check_accepts_safe_code(code: str) -> None:
    assert list(findings(ast.parse(code))) == []


def test_product_never_executes_data_it_reads() -> None:
    assert len(PRODUCT) > 100
    found = {
        str(path.relative_to(ROOT)): list(findings(ast.parse(path.read_text()))) for path in PRODUCT
    }
    assert {path: names for path, names in found.items() if names} == EXCEPTIONS
