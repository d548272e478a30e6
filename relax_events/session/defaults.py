"""Resolves the keys that a run file leaves out: values of an earlier session are kept, the others
are derived, once.

They are derived from the models' checkpoints and from the machine of the workers: its processors,
memory and GPUs, found without torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import structlog

from relax_events.config import RunConfig
from relax_events.config.hub_names import find_earlier_name
from relax_events.config.run_config import RANKED_ROLES
from relax_events.config.training import ADAMW
from relax_events.config.unset_keys import OF_MACHINE, get_value, missing_keys, with_values
from relax_events.models.checkpoint_facts import read_facts, tiny_facts
from relax_events.planning.derived import Derived, derive
from relax_events.planning.inventory import CheckpointFacts, Machine, num_processors
from relax_events.session.gpus import find_gpus

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def inspect_machine(
    roles: Mapping[str, int], *, log_folder: Path | None = None, num_hosts: int = 1
) -> Machine:
    """Return the resources of the machine that this process may use.

    Args:
        roles: Number of workers of each role on it; trainer and critic count as their ranks.
        log_folder: Where its broker will keep the log, if it has one.
        num_hosts: How many machines like it the workers are on.
    """
    memories = tuple(gpu.num_bytes for gpu in find_gpus())
    free = 0 if log_folder is None else shutil.disk_usage(find_parent(log_folder)).free
    return Machine(
        num_processors() * num_hosts,
        _memory() * num_hosts,
        memories * num_hosts,
        dict(roles),
        free,
        num_hosts,
    )


def find_parent(folder: Path) -> Path:
    """Return a folder that may be yet to be made, or its nearest parent that exists."""
    there = folder.absolute()
    return next(path for path in (there, *there.parents) if path.exists())


def _memory() -> int:
    """Return the machine's memory, or the limit of this process's container."""
    num_bytes: int = psutil.virtual_memory().total
    for path in CGROUP_LIMITS:
        try:
            with open(path) as file:
                num_bytes = min(num_bytes, int(file.read()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return num_bytes


log = structlog.get_logger()
RESOLVED_FILE = "run.json"
"""In a run's folder: the resolved run file."""


def resolve_defaults(
    config: RunConfig,
    *,
    earlier_config: RunConfig | None = None,
    role: str = "",
    has_broker: bool = False,
) -> tuple[RunConfig, list[Derived]]:
    """Return the configuration with the keys that its run file leaves out, and their values with
    reasons.

    Args:
        config: The run file as read.
        earlier_config: The run as it was in its last session, or the parent run.
        role: The only role on this machine; by default the whole run is on it.
        has_broker: Whether the run's log is on this machine's disk.
    Raises:
        ConfigError: A checkpoint can't be read.
    """
    if not (missing := missing_keys(config)):
        return with_values(config, {}), []
    kept = (
        []
        if earlier_config is None
        else _kept(earlier_config, [key for key in missing if not (role and key in OF_MACHINE)])
    )
    config = with_values(config, {derived.key: derived.value for derived in kept})
    processes = config.separate_processes()
    roles = {role: processes.get(role, 1) if role in RANKED_ROLES else 1} if role else processes
    fresh = (
        derive(
            config,
            read_checkpoint_facts(config),
            inspect_machine(
                roles,
                log_folder=config.run.directory if has_broker else None,
                num_hosts=1 if role else config.hosts.num_hosts,
            ),
        )
        if missing_keys(config)
        else []
    )
    return with_values(config, {derived.key: derived.value for derived in fresh}), kept + fresh


def _kept(earlier_config: RunConfig, keys: list[str]) -> list[Derived]:
    values = {key: get_value(earlier_config, key) for key in keys}
    return [
        Derived(key, value, f"run {earlier_config.run.id} started with it")
        for key, value in values.items()
        if value is not None
    ]


def read_checkpoint_facts(config: RunConfig) -> dict[str, CheckpointFacts]:
    """Return the properties of the run's checkpoints, as far as they exist or will be made."""
    tiny = config.model.tiny
    paths: dict[str, Path | None] = {
        "model": config.model.path,
        "judge": config.judge.model_path,
        "teacher": config.teacher.model_path,
        **{f"teachers.{name}": one.model_path for name, one in config.teachers.items()},
    }
    facts = {
        section: read_facts(path)
        for section, path in paths.items()
        if path is not None and (path / "config.json").is_file()
    }
    if "model" not in facts and tiny is not None:
        facts["model"] = tiny_facts(tiny)
    if "model" in facts and config.trainer.optimizer != ADAMW:
        facts["model"] = replace(facts["model"], optimizer_bytes=_measure_optimizer(config))
    return facts


def _measure_optimizer(config: RunConfig) -> float:
    """Measure an optimizer's state; loads torch."""
    from relax_events.models.optimizers import measure_state_bytes

    return measure_state_bytes(config.trainer)


def read_resolved(config: RunConfig) -> RunConfig | None:
    """Return the resolved configuration of a run's last session on this machine; None where there
    was none, or it can't be read any more.
    """
    try:
        return RunConfig.model_validate_json((config.run_directory / RESOLVED_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def keep_commits(config: RunConfig, earlier_config: RunConfig | None) -> RunConfig:
    """Return the configuration with the commits of an earlier session for the names of the hub that
    the run file gives without a revision: the hub's main branch may have moved since.

    Args:
        config: The run file as read.
        earlier_config: The run as it was, or None.
    """
    if earlier_config is None or not config.unpinned_names:
        return config
    tree, earlier_tree = (one.model_dump(mode="json") for one in (config, earlier_config))
    for key, text in config.unpinned_names.items():
        *sections, last = key.split(".")
        table, earlier_table = (_find_table(one, sections) for one in (tree, earlier_tree))
        if (earlier := find_earlier_name(text, earlier_table.get(last))) is not None:
            table[last] = earlier
            log.info("commit.kept", key=key, name=earlier, run_id=earlier_config.run.id)
    return RunConfig.model_validate(tree).with_unpinned_names(config.unpinned_names)


def _find_table(tree: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Return the table at some keys, of which numbers are those of lists; an empty one where there
    is none.
    """
    for key in keys:
        try:
            tree = tree[int(key)] if isinstance(tree, list) else tree[key]
        except LookupError:
            return {}
    return tree if isinstance(tree, dict) else {}


def log_derived(settings: list[Derived]) -> None:
    """Log the derived values with their reasons."""
    for derived in settings:
        write = log.warning if derived.is_warning else log.info
        write("default.derived", key=derived.key, value=derived.value, reason=derived.reason)
