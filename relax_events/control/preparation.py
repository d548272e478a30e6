"""Makes what a run needs before it starts and that can be made here: a tiny model with its warm start."""

from __future__ import annotations

import subprocess
import sys

from relax_events.config import RunConfig
from relax_events.control.supervisor import worker_environment
from relax_events.errors import ConfigError, RunFailed


def prepare_run(config: RunConfig) -> None:
    """Make the model if it is to be made and is not there. In a process of its own, so that this one stays light.

    Raises:
        ConfigError: The model's folder does not exist and the run file doesn't say how to make one.
        RunFailed: Making it failed; what it printed stands above.
    """
    if config.model.path.exists():
        return
    if config.model.tiny is None:
        raise ConfigError(f"model.path {config.model.path} does not exist; give the folder of a checkpoint, or a [model.tiny] section to make a small model")
    resolved = config.run_directory / "prepare.json"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "relax_events.cli", "models", "prepare", str(resolved)]
    code = subprocess.run(command, env=worker_environment(), check=False, stdout=sys.stderr).returncode
    if code == ConfigError.exit_code:
        raise ConfigError("the model could not be made; the reason stands above")
    if code:
        raise RunFailed(f"making the model ended with exit code {code}; what it printed stands above")
