"""Prepares a run before it starts: makes its required checks, and a tiny model with its SFT
warm-up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from functools import partial

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, RunFailed
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.checks import Level, refuse_run
from relax_events.launcher.file_checks import check_context_length
from relax_events.launcher.fork_protocol import worker_environment
from relax_events.launcher.hub_download import Report, fetch_data, fetch_models
from relax_events.secret_handling import write_private


def prepare_run(config: RunConfig, *, levels: Collection[Level] = tuple(Level)) -> None:
    """Fetch what a run names on the hub, refuse a run that can't work before anything
    starts, and make the model if it is configured and missing.

    Args:
        config: The run.
        levels: Of the checks to make.
    Raises:
        ConfigError: The run file names a role, a model, a data file or a row that is missing or
            invalid.
        EnvironmentProblem: A package is not installed, a port is taken, or the hub can't be
            reached.
        RunFailed: Making the model failed; its output is above.
    """
    fetch_named(config, report=partial(print, file=sys.stderr, flush=True))
    run = CheckedRun(config)
    refuse_run(run, levels=levels)
    if not config.model.path.exists():
        _make_model(config)
        check_context_length(run)


def fetch_named(config: RunConfig, *, report: Report) -> None:
    """Fetch the models and datasets that a run names on the hub.

    Args:
        config: The run, whose names have commits.
        report: Called with a line for each that is fetched.
    Raises:
        ConfigError: The hub has no such commit, or another format.
        EnvironmentProblem: The hub refuses one or can't be reached, or the disk is full.
    """
    fetch_models(config.list_models(), report=report)
    fetch_data(config.list_sources(), report=report)


def _make_model(config: RunConfig) -> None:
    """Make the model in a child process, so that this process stays small."""
    resolved = config.run_directory / "prepare.json"
    write_private(resolved, config.model_dump_json().encode())
    command = [sys.executable, "-m", "relax_events.cli", "models", "prepare", str(resolved)]
    code = subprocess.run(
        command, env=worker_environment(), check=False, stdout=sys.stderr
    ).returncode
    if code == ConfigError.exit_code:
        raise ConfigError("the model could not be made; the reason is above")
    if code:
        raise RunFailed(f"making the model ended with exit code {code}; its output is above")
