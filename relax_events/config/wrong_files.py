"""Says what a file is that was given as a run file, and what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv", ".zst", ".gz")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".distcp")
YAML = (".yaml", ".yml")
EXAMPLE = "for example configs/quickstart.toml"
INIT = "relax init writes a run file: relax init --model MODEL_FOLDER --data DATA_FILE"


def explain_path(path: Path) -> str:
    """Return what a path is other than a run file, with the remedy; empty where it may be one."""
    suffix = path.suffix.lower()
    if path.is_dir():
        return _explain_folder(path)
    if suffix in DATA:
        remedy = f"give a run file, in TOML, whose data.source names it; {EXAMPLE}. {INIT}"
        return f"{path} holds rows of data and is no run file; {remedy}"
    if suffix in WEIGHTS:
        remedy = f"give a run file whose model.path names its folder; {EXAMPLE}. {INIT}"
        return f"{path} holds weights and is no run file; {remedy}"
    if suffix == ".py":
        remedy = (
            f"give a run file that names its function: reward.function, environment.function, "
            f'data.prompt_filter = "{path}:FUNCTION"; {EXAMPLE}'
        )
        return f"{path} is Python and no run file; {remedy}"
    if suffix in YAML:
        return (
            f"{path} is YAML and no run file; run files are TOML; docs/how-to/migrate.md lists the "
            f"keys of other engines; {EXAMPLE}"
        )
    return ""


def _explain_folder(path: Path) -> str:
    if (path / "config.json").is_file():
        remedy = f"give a run file whose model.path names it; {EXAMPLE}. {INIT}"
        return f"{path} is a model's folder and no run file; {remedy}"
    if (path / "run.json").is_file():
        return f"{path} is a run's folder; its run file as resolved is {path / 'run.json'}"
    names = sorted(one.name for one in path.glob("*.toml"))[:3]
    remedy = f"give one of its files: {', '.join(names)}" if names else f"give a file; {EXAMPLE}"
    return f"{path} is a folder and no run file; {remedy}"


def explain_tree(path: Path, tree: Mapping[str, Any] | list[Any]) -> str:
    """Return what the content of a JSON or TOML file is other than a run file; likewise."""
    if isinstance(tree, list):
        if tree and all(isinstance(row, dict) for row in tree[:8]):
            remedy = f"write it as one object a line (.jsonl) and name it in data.source; {EXAMPLE}"
            return f"{path} holds a list of rows and is no run file; {remedy}"
        return ""
    if "run_id" in tree and "curves" in tree:
        remedy = f"its run file as resolved is {path.with_name('run.json')}"
        return f"{path} is the report of run {tree['run_id']} and no run file; {remedy}"
    if "architectures" in tree or "model_type" in tree:
        remedy = f"give a run file whose model.path names its folder; {EXAMPLE}. {INIT}"
        return f"{path} is a model's configuration and no run file; {remedy}"
    if "project" in tree and "build-system" in tree:
        return f"{path} is a Python project and no run file; give a run file, {EXAMPLE}"
    return ""
