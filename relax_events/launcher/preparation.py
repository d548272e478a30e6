"""Prepares a run before it starts: checks its requirements, and makes a tiny model with its SFT
warm-up.
"""

from __future__ import annotations

import subprocess
import sys

from relax_events.config import RunConfig
from relax_events.data.prompt_filter import find_hook
from relax_events.data.rendering import read_chat_template
from relax_events.data.sources import (
    is_generated,
    named_evaluation_datasets,
    named_sources,
    open_source,
)
from relax_events.errors import ConfigError, RunFailed
from relax_events.launcher.fork_protocol import worker_environment
from relax_events.launcher.requirements import REQUIREMENTS, require_context_length
from relax_events.secret_handling import write_private
from relax_events.session.defaults import read_resolved, resolve_defaults


def prepare_run(config: RunConfig) -> None:
    """Refuse a run that can't work before anything starts, and make the model if it is configured
    and missing.

    Raises:
        ConfigError: The run file names a role, a model, a data file or a row that is missing or
            invalid.
        EnvironmentProblem: A package is not installed, or a port is taken.
        RunFailed: Making the model failed; its output is above.
    """
    for require in REQUIREMENTS.values():
        require(config)
    _check_rows(config)
    if not config.model.path.exists():
        _make_model(config)
    require_context_length(resolve_defaults(config, earlier_config=read_resolved(config))[0])


def _check_rows(config: RunConfig) -> None:
    """Check every row of every file that the run will read, and the templates and filters that will
    process them.

    Generated problems are skipped: their libraries take seconds to import, and the prompter imports
    them while other workers start.
    """
    prompts, evaluated = (
        [] if config.is_replay else named_sources(config.data),
        named_evaluation_datasets(config.evaluation),
    )
    if prompts or evaluated:
        read_chat_template(config.data)
    if prompts and config.data.prompt_filter:
        find_hook(config.data.prompt_filter)
    for section, part in [*prompts, *evaluated]:
        if not is_generated(part):
            open_source(part, seed=config.run.seed, section=section)


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
