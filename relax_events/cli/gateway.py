"""`relax gateway`: sessions on a run for a harness that a person starts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from relax_events.cli.parameters import Overrides


def gateway(config: Path, *overrides: Overrides, index: int | Literal["host"] = 0) -> None:
    """Serve sessions on a run to harnesses that people start, until Ctrl-C: a rollout worker whose
    prompts harnesses take.

    Example: relax gateway run.toml --index 1

    Args:
        config: The run file, TOML; `environment.harness` says where to listen.
        index: Tells it apart from the run's other rollout workers, and is added to the port; `host`
            takes one from the machine's name, for replicas that are started alike.
    """
    from relax_events.cli.run import worker
    from relax_events.config import load_run_config
    from relax_events.errors import ConfigError

    harness = load_run_config(config, overrides).environment.harness
    if not harness.is_served:
        raise ConfigError(
            f"{config} serves no harness; set environment.harness.port and "
            "environment.harness.token_file"
        )
    worker("rollout", config, *overrides, index=index)
