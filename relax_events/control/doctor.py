"""Checks everything that a run needs, and starts nothing: each finding says what is wrong and what to do."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from relax_events.broker.admin import Admin
from relax_events.broker.connection import Connection
from relax_events.broker.embedded.java import find_java
from relax_events.config import RunConfig
from relax_events.control.address import embedded_broker
from relax_events.control.topics import plan_changes
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError, RelaxError
from relax_events.objects import ObjectStore
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.topics import TopicPlan

MIN_FREE_BYTES = 1024**3
PROBE = b"relax doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    is_good: bool
    text: str


def examine(config: RunConfig) -> list[Finding]:
    """Run every check; one that fails doesn't keep the others from running."""
    checks: dict[str, Callable[[RunConfig], str]] = {
        "broker": check_broker,
        "object store": check_store,
        "disk": check_disk,
        "model": check_model,
        "data": check_data,
        "reward": check_reward,
        "roles": check_roles,
    }
    return [_finding(what, check, config) for what, check in checks.items()]


def _finding(what: str, check: Callable[[RunConfig], str], config: RunConfig) -> Finding:
    try:
        return Finding(what, True, check(config))
    except RelaxError as error:
        return Finding(what, False, str(error))


def check_broker(config: RunConfig) -> str:
    """The cluster answers and its topics don't contradict the plan; or Java is there for the embedded broker."""
    broker = embedded_broker(config)
    servers = config.broker.bootstrap_servers if broker is None else broker.bootstrap_servers if broker.is_running else ""
    if not servers:
        return f"embedded, not running; Java {find_java().version}"
    admin = Admin(Connection(servers, 5.0, config.broker.client))
    num_brokers = admin.ping(timeout_seconds=5)
    plan = TopicPlan.of(config)
    changes = plan_changes(plan.specs(), admin.topics(plan.topic("")))
    if conflicts := [change for change in changes if change.kind == "conflict"]:
        raise ConfigError(f"topic {conflicts[0].topic} {conflicts[0].detail}; take another run.id")
    return f"{num_brokers} broker(s) at {servers}, {len(changes)} topic change(s) to apply"


def check_store(config: RunConfig) -> str:
    """The object store takes an object and gives it back."""
    store = ObjectStore.open(config.objects_uri)
    reference = store.put_at("doctor/probe", PROBE)
    store.get(reference)
    store.delete(["doctor/probe"])
    return f"{config.objects_uri} can be written and read"


def check_disk(config: RunConfig) -> str:
    """The run's directory has room."""
    folder = next(path for path in (config.run.directory.absolute(), *config.run.directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ConfigError(f"{folder} has {free / 1e9:.2f} GB free, a run wants at least {MIN_FREE_BYTES / 1e9:.2f}; free some space or set run.directory")
    return f"{free / 1e9:.0f} GB free in {folder}"


def check_model(config: RunConfig) -> str:
    """The model's folder is there and whole, or will be made; the libraries for it are installed."""
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed; install relax-events[model]")
    path: Path = config.model.path
    if not path.exists():
        if config.model.tiny is None:
            raise ConfigError(f"model.path {path} does not exist; give the folder of a checkpoint, or a [model.tiny] section")
        return f"{path} will be made by the run"
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).exists():
            raise ConfigError(f"model.path {path} has no {name}; give a complete folder in Hugging Face layout")
    if not list(path.glob("*.safetensors")):
        raise ConfigError(f"model.path {path} has no *.safetensors; convert the weights (no other format is read)")
    return f"{path} is complete"


def check_data(config: RunConfig) -> str:
    """The prompts can be opened, and the first one read."""
    source = open_source(config.data, seed=config.run.seed)
    source.row(0)
    return f"{source.rows} prompts in {config.data.source}"


def check_reward(config: RunConfig) -> str:
    """The reward function loads, and answers or fails on a real row in time."""
    row = open_source(config.data, seed=config.run.seed).row(0)
    with RewardPool(config.reward) as pool:
        result = pool.score_batch([RewardItem(sample_id="doctor", completion="", answer=row.answer, metadata=row.metadata)])[0]
    if isinstance(result, RelaxError):
        raise result
    return f"{config.reward.function} gives {result.reward:g} for an empty completion"


def check_roles(config: RunConfig) -> str:
    """Every role, engine and backend that the run names is installed."""
    wanted = [("relax_events.roles", role) for role in config.roles()]
    wanted += [("relax_events.engines", config.engine.name), ("relax_events.trainer_backends", config.trainer.backend)]
    for group, name in wanted:
        if name not in {entry.name for entry in entry_points(group=group)}:
            raise ConfigError(f"{name!r} is not installed (entry point group {group})")
    return ", ".join(f"{role} x {count}" for role, count in config.roles().items())
