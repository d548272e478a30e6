"""Makes what a run needs before it starts and that can be made here: a tiny model with its warm
start.
"""

from __future__ import annotations

import subprocess
import sys

from relax_events.config import RunConfig
from relax_events.data.prompt_filter import find_hook
from relax_events.data.rendering import read_chat_template
from relax_events.data.sources import named_evaluation_datasets, is_generated, named_sources, open_source
from relax_events.errors import ConfigError, RunFailed
from relax_events.launcher.fork_protocol import worker_environment
from relax_events.launcher.requirements import REQUIREMENTS, require_context_length
from relax_events.runtime.private_files import write_private
from relax_events.session.defaults import read_resolved, resolve_defaults


def prepare_run(config: RunConfig) -> None:
    """Refuse what can't work before anything is started, and make the model if it is to be made and
    is not there.

    Raises:
        ConfigError: The run file names a role, a model, a data file or a row that is missing or
            unfit.
        EnvironmentProblem: A package is not installed, or a port is taken.
        RunFailed: Making the model failed; what it printed stands above.
    """
    for require in REQUIREMENTS.values():
        require(config)
    _check_rows(config)
    if not config.model.path.exists():
        _make_model(config)
    require_context_length(resolve_defaults(config, known=read_resolved(config))[0])


def _check_rows(config: RunConfig) -> None:
    """Look at every row of every file that the run will read, and at what renders and judges them.

    Generators of problems take seconds to import, which the prompter does while the other workers
    start.
    """
    prompts, evaluated = (
        [] if config.is_replay else named_sources(config.data),
        named_evaluation_datasets(config),
    )
    if prompts or evaluated:
        read_chat_template(config.data)
    if prompts and config.data.prompt_filter:
        find_hook(config.data.prompt_filter)
    for section, part in [*prompts, *evaluated]:
        if not is_generated(part):
            open_source(part, seed=config.run.seed, section=section)


def _make_model(config: RunConfig) -> None:
    """Make the model in a process of its own, so that this one stays light."""
    resolved = config.run_directory / "prepare.json"
    write_private(resolved, config.model_dump_json().encode())
    command = [sys.executable, "-m", "relax_events.cli", "models", "prepare", str(resolved)]
    code = subprocess.run(
        command, env=worker_environment(), check=False, stdout=sys.stderr
    ).returncode
    if code == ConfigError.exit_code:
        raise ConfigError("the model could not be made; the reason stands above")
    if code:
        raise RunFailed(
            f"making the model ended with exit code {code}; what it printed stands above"
        )
