"""`relax init`: run files to start from."""

from __future__ import annotations

import re
from pathlib import Path

from relax_events.errors import CheckFailed, ConfigError


def init(
    path: Path | None = None,
    *,
    model: Path | None = None,
    data: Path | None = None,
    run_id: str = "",
    split: str = "",
    prompt: str = "",
    answer: str = "",
    reward: str = "",
    force: bool = False,
) -> int:
    """Write a commented run file from a model's folder and a dataset, and check it as the doctor
    does; exit code 6 when a check found something. Without both, write the run files that the
    package brings, the quickstart's among them.

    Example: relax init mine.toml --model models/Qwen3-0.6B --data data/gsm8k.jsonl

    Columns, chat template, lengths and memory are looked up; a reward is proposed from the answers.

    Args:
        path: The file to write, TOML; or the folder for the run files of the package, by default
            `configs`, where `configs/lookup-agent.toml` expects its files.
        model: Folder of a model in Hugging Face layout, or its name on the hub, hf:org/name, of
            which the run file names the commit.
        data: JSON lines, a Parquet file, a folder of Parquet files, or a name on the hub,
            hf:org/name:config:split.
        run_id: Of the run; by default the name of the run file.
        split: Of a folder of Parquet files, such as train.
        prompt: Column of the prompt; by default looked up.
        answer: Column of the reference answer; likewise.
        reward: A reward function, by name or as path/to/file.py:function; by default proposed.
        force: Overwrite existing files.
    """
    from relax_events.cli.output import print_findings
    from relax_events.config import load_run_config
    from relax_events.launcher.checks import check_run
    from relax_events.launcher.run_file.examples import write_examples
    from relax_events.launcher.run_file.proposal import Wishes, propose_run_file

    if model is None and data is None:
        for written in write_examples(path or Path("configs"), force=force):
            print(written)
        return 0
    if model is None or data is None:
        raise ConfigError("a run file is made from a model and a dataset; give --model and --data")
    run_file = path or Path("run.toml")
    _require_free(run_file, force=force)
    name = run_id or re.sub(r"[^a-z0-9-]+", "-", run_file.stem.lower()).strip("-") or "run"
    wishes = Wishes(prompt=prompt, answer=answer, reward=reward, split=split)
    run_file.write_text(propose_run_file(name, model, data, wishes), encoding="utf-8")
    print(f"wrote {run_file}")
    findings, _ = check_run(load_run_config(run_file))
    print_findings(findings)
    if not all(finding.is_good for finding in findings):
        print(f"repair what failed, then: relax doctor {run_file}")
        return CheckFailed.exit_code
    print(f"begin with: relax run {run_file}")
    return 0


def _require_free(run_file: Path, *, force: bool) -> None:
    if run_file.exists() and not force:
        raise ConfigError(f"{run_file} exists; give another name, or --force to overwrite it")
    if run_file.suffix != ".toml":
        raise ConfigError(f"{run_file} must end in .toml; for example run.toml")
