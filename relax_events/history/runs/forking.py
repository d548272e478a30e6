"""Writes the run file of a replay or a fork from the parent's description on the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from relax_events.config import RunConfig, load_run_config
from relax_events.errors import BrokerRefused, ConfigError, CorruptRecord, SchemaError
from relax_events.events.types import PromptGroupIssued
from relax_events.history.cluster import Cluster
from relax_events.history.runs.details import list_versions, open_existing_store
from relax_events.history.runs.inherited_code import Accept, read_own_run_files, require_trust
from relax_events.history.runs.listing import read_runs
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.runtime.run_description import SHAPE_KEYS, ParentRun
from relax_events.secret_handling import write_private
from relax_events.topics.names import PROMPT_GROUPS

RUN_FILE = "run-file.json"
NEWEST = -1
SAME_FOR_VERIFYING = ("algorithm", "critic", "trainer", "model")


@dataclass(frozen=True, slots=True)
class ParentChoice:
    """Which run a new one goes back to, and how; see `ParentSection`."""

    run: str
    mode: str
    from_version: int = NEWEST
    until_version: int = NEWEST
    follow: bool = False
    scores: str = ""


def make_run_file(
    cluster: Cluster,
    source: ParentRun,
    run_id: str,
    choice: ParentChoice,
    overrides: Sequence[str],
    *,
    accept: Accept,
) -> RunConfig:
    """Write the run file of a new run into its directory, and return its configuration.

    It holds the parent's settings with the overrides on top; another algorithm starts with its own
    defaults. A repeated call for the same run gives the same file, so that an interrupted run is
    resumed. Code, programs, addresses and files that the parent names are inherited only where a
    run file of the caller agrees or the caller accepts them; none is used before.

    Args:
        cluster: Where both runs are.
        source: The parent run.
        run_id: The new run.
        choice: Which versions of the parent, and how.
        overrides: section.key=value.
        accept: See `require_trust`.
    Raises:
        ConfigError: A key or value is not allowed, or the parent's external values were not
            accepted.
        BrokerRefused: The cluster has another run of this id.
    """
    _refuse_other_names(overrides)
    _refuse_other_run(source.connection, run_id, choice.run)
    run_files = read_own_run_files(
        cluster.directory, choice.run, source.config.parent.run, run_id, named=cluster.run_file
    )
    is_replay = choice.mode == "replay"
    require_trust(
        source.config,
        is_replay=is_replay,
        run_files=run_files,
        directory=cluster.directory,
        overrides=overrides,
        accept=accept,
    )
    tree = source.config.model_dump(mode="json")
    tree["run"] |= {"id": run_id, "directory": str(cluster.directory.resolve())}
    broker = (
        cluster.run_file.broker if cluster.run_file else cluster.broker
    )  # without this process's principal
    tree["broker"] = broker.model_dump(mode="json") | {
        key: tree["broker"][key] for key in SHAPE_KEYS
    }
    if tree["objects"]["uri"] and not tree["objects"]["by_run"]:
        tree["objects"]["uri"] = f"{tree['objects']['uri'].rstrip('/')}-{run_id}"
    tree["telemetry"]["metrics_port"] = 0
    tree["parent"] = _source_section(source, choice)
    tree["algorithm"] = inherited_algorithm(tree["algorithm"], overrides)
    path = cluster.directory / "runs" / run_id / RUN_FILE
    write_private(path, orjson.dumps(tree, option=orjson.OPT_INDENT_2))
    config = load_run_config(path, overrides)
    write_private(path, orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
    return config


def inherited_algorithm(algorithm: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings of the parent's algorithm that hold under the overrides: another
    algorithm or correction starts with its own.
    """
    named = {
        key.strip(): value.strip().strip("\"'")
        for key, _, value in (override.partition("=") for override in overrides)
    }
    if named.get("algorithm.name", algorithm["name"]) != algorithm["name"]:
        return {}
    is_corrected_otherwise = (
        named.get("algorithm.correction", algorithm["correction"]) != algorithm["correction"]
    )
    dropped = ("correction_low", "correction_high") if is_corrected_otherwise else ()
    return {key: value for key, value in algorithm.items() if key not in dropped}


def _refuse_other_run(connection: Connection, run_id: str, source_id: str) -> None:
    there = read_runs(connection, [run_id]).get(run_id)
    if there is not None and not (there.description and there.description.parent_run == source_id):
        raise BrokerRefused(
            f"there is a run {run_id!r} already that does not go back to {source_id!r}; take "
            "another id, or delete that run"
        )


def _source_section(source: ParentRun, choice: ParentChoice) -> dict[str, Any]:
    newest = max(
        (step.policy_version for step in source.steps()), default=source.config.first_version
    )
    is_replay = choice.mode == "replay"
    start = source.config.first_version if is_replay else newest
    version = start if choice.from_version == NEWEST else choice.from_version
    return {
        "run": choice.run,
        "mode": choice.mode,
        "from_version": version,
        "until_version": newest
        if is_replay and choice.until_version == NEWEST and not choice.follow
        else choice.until_version,
        "follow": choice.follow,
        "scores": choice.scores,
        "objects_uri": source.objects_uri,
        "from_row": 0 if is_replay else find_first_row(source, version),
    }


def _refuse_other_names(overrides: Iterable[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key == "run.id" or key.startswith("parent."):
            raise ConfigError(
                f"override {override!r}: which run goes back to which is said by arguments "
                "and options; see --help"
            )


def find_first_row(source: ParentRun, version: int) -> int:
    """Return the row of the prompt stream that the parent issued first for the step at a version: a
    fork continues there.

    Where that step was never issued it is the row after the last one. Where the queue was purged it
    is the row that a run reaches if no prompt group was replaced.
    """
    topic, codec = source.plan.topic(PROMPT_GROUPS), source.codec()
    behind, rows = 0, []
    reader = LogReader(source.connection)
    try:
        spans = {
            (topic, number): reader.watermarks(topic, number)
            for number in range(source.plan.queue_partitions)
        }
        for record in reader.stream(spans):
            try:
                event = codec.decode(record.value)
            except (CorruptRecord, SchemaError):
                continue  # a record of an untrusted producer, which the rollout role dead-letters
            if isinstance(event, PromptGroupIssued):
                behind = max(behind, event.row + 1)
                if event.train_step == version and event.attempt == 0:
                    rows.append(event.row)
    finally:
        reader.close()
    return min(rows, default=behind or version * source.config.run.prompts_per_step)


def require_verifiable(source: ParentRun, config: RunConfig) -> None:
    """Refuse a bit-for-bit comparison of a replay that can't be equal.

    Raises:
        ConfigError: It has other settings, or starts where no optimizer state is left; the text
            names the difference.
    """
    store, version = open_existing_store(source.config), config.parent.from_version
    checkpoints = list_versions(store, "checkpoints/") if store else []
    if version not in (0, *checkpoints):
        left = (
            f"of run {source.config.run.id} there are those of "
            f"{', '.join(map(str, checkpoints)) or 'none'}"
        )
        raise ConfigError(
            "--verify compares bit for bit, so it begins at version 0 or at a checkpoint "
            f"({left}), got version {version}"
        )
    for section in SAME_FOR_VERIFYING:
        if getattr(config, section).model_dump() != getattr(source.config, section).model_dump():
            raise ConfigError(
                f"--verify compares bit for bit, so [{section}] must be as in run "
                f"{source.config.run.id}; leave it as it is"
            )
    same_run = {"seed", "num_steps"}
    if (
        config.run.model_dump(include=same_run) != source.config.run.model_dump(include=same_run)
        or config.parent.scores
    ):
        raise ConfigError(
            "--verify compares bit for bit, so run.seed, run.num_steps and the rewards must "
            "be the source's; leave them as they are"
        )
