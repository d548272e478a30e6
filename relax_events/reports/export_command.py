"""The command that exports a run's model, as its report states it."""

from __future__ import annotations

import shlex
from pathlib import Path

from relax_events.config import RunConfig
from relax_events.session.broker_address import embedded_broker

DEFAULT_DIRECTORY = Path(".relax")
RUN_FILE = "RUN.toml"
"""Stands for the run file, which a secured cluster's password files make necessary."""


def build_export_command(config: RunConfig) -> str:
    """Return the shell command that exports the newest version of a run, from the folder in which
    the run was started.

    Args:
        config: The run, with or without the broker's address filled in.
    """
    run_id, broker = config.run.id, config.broker
    words = ["relax", "models", "export", run_id, "--to", f"{run_id}-model"]
    if embedded_broker(config) is not None:
        if config.run.directory != DEFAULT_DIRECTORY:
            words += ["--directory", str(config.run.directory)]
    elif broker.credentials is None and not broker.client:
        words += ["--bootstrap-servers", broker.bootstrap_servers]
    else:
        words += ["--config", RUN_FILE]
    return shlex.join(words)
