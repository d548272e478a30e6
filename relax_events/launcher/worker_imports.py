"""Which modules a role's worker imports before its work starts."""

from __future__ import annotations

from pathlib import Path

from relax_events.config import RunConfig
from relax_events.plugins import ENGINES, ROLES, TRAINER_BACKENDS, list_installed

BACKEND_ROLES = frozenset({"reference", "actor-forward", "critic", "teacher", "trainer"})
"""Roles that load the trainer's backend."""
TORCH_ROLES = frozenset({"trainer", "critic"})
"""Roles whose own modules import torch."""
COMMAND = "relax_events.cli.run"
ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Device files of GPU drivers. Where one exists, `auto` means a GPU."""


def worker_modules(config: RunConfig, role: str) -> list[str]:
    """List the modules that a role's worker on this machine imports at its start."""
    is_on_cpu = computes_on_cpu(config)
    names = [(ROLES, role)] if is_on_cpu or role not in TORCH_ROLES else []
    if is_on_cpu:
        engines = {
            "rollout": config.rollout_engine,
            "evaluator": config.engine.name,
            "judge": config.judge.engine.name,
        }
        names += [
            (ENGINES, engines.get(role, "")),
            (TRAINER_BACKENDS, config.trainer.backend if role in BACKEND_ROLES else ""),
        ]
    return [
        COMMAND,
        *(
            list_installed(group)[name].module
            for group, name in names
            if name in list_installed(group)
        ),
    ]


def computes_on_cpu(config: RunConfig) -> bool:
    """Return whether torch may be imported before a fork. A process that has initialised a GPU, as
    some imports do, can't be forked.
    """
    known = {"cpu"} if any(path.exists() for path in ACCELERATORS) else {"cpu", "auto"}
    return {config.model.device, config.judge.device, config.teacher.device} <= known


def run_modules(config: RunConfig) -> list[str]:
    """List the modules of all roles of a run, each once."""
    return list(
        dict.fromkeys(name for role in config.roles() for name in worker_modules(config, role))
    )
