"""`relax models export`: a run's model as a folder that other programs load."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.ops.model_export.export import Export
    from relax_events.ops.model_export.versions import PublishedVersions

SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B", re.IGNORECASE)
UNITS = ("", "K", "M", "G", "T")
HOME = Path(".relax")
ATTEMPTS = 5
"""Newest versions that are tried while a running trainer deletes them."""


def export(
    run: str,
    *,
    to: Path,
    version: Annotated[int | None, Parameter(help="The policy version.")] = None,
    best: Annotated[
        str,
        Parameter(help="Metric whose best version is exported, as reward_mean or gsm8k/pass_at_4."),
    ] = "",
    base: Annotated[Path | None, Parameter(help="The base model's folder.")] = None,
    max_shard_size: Annotated[
        str, Parameter(help="Largest size of a weight file, as 5GB or 500MB.")
    ] = "5GB",
    force: Annotated[bool, Parameter(help="Replace a model folder that is there.")] = False,
    config: Annotated[Path | None, Parameter(help="A run file whose broker is meant.")] = None,
    bootstrap_servers: Annotated[
        str, Parameter(help="The cluster that is meant, as host:port,host:port.")
    ] = "",
    directory: Annotated[
        Path, Parameter(help="Where runs and the embedded broker keep their files.")
    ] = HOME,
    output: Literal["table", "json"] = "table",
) -> None:
    """Write the model of a run as a folder that transformers, SGLang and `relax serve` load, during
    the run or after it.

    Example: relax models export quickstart --to exported

    The newest version is exported unless --version or --best names another. What was not trained
    comes from the base model's folder, `model.path` of the run.

    Args:
        run: Id of the run, or its run file.
        to: The folder to write.
        version: The policy version.
        best: Metric of the evaluations whose best version is exported, as reward_mean or
            gsm8k/pass_at_4; without a dataset the mean over those that have it.
        base: The base model's folder, where it is no longer at `model.path`.
        max_shard_size: Largest size of a weight file, as 5GB or 500MB.
        force: Replace a model folder that is there.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: A table to read, or JSON for programs.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json, print_pairs
    from relax_events.cli.run_reader import open_run
    from relax_events.ops.model_export.new_folder import require_free

    max_shard_bytes = parse_size(max_shard_size)
    require_free(to.resolve(), replaces=force)
    with open_run(
        run, config=config, bootstrap_servers=bootstrap_servers, directory=directory, name="export"
    ) as settings:
        settings = settings if base is None else _with_base(settings, base)
        done = _export(
            settings,
            to,
            version=version,
            best=best,
            max_shard_bytes=max_shard_bytes,
            replaces=force,
        )
    if output == "json":
        print_json(asdict(done))
    else:
        print_pairs(asdict(done))


def _export(
    settings: RunConfig, to: Path, *, version: int | None, best: str, **options: Any
) -> Export:
    """Export the version that was asked for; the newest is chosen again where a running trainer has
    replaced it meanwhile.
    """
    # before the log is read: a fast run would delete the newest version during the import
    from relax_events.ops.model_export.export import export_version
    from relax_events.ops.model_export.run_settings import as_described
    from relax_events.ops.model_export.sources import VersionLost
    from relax_events.ops.model_export.versions import choose_version

    tried: set[int] = set()
    while True:
        versions = _read_versions(settings)
        chosen = choose_version(versions, version=version, best=best)
        described = as_described(settings, versions.state)
        try:
            return export_version(described, versions, chosen, to, report=_say, **options)
        except VersionLost:
            tried.add(chosen)
            is_newest = version is None and not best
            if not is_newest or len(tried) == ATTEMPTS or _newest(settings) in tried:
                raise


def _read_versions(settings: RunConfig) -> PublishedVersions:
    from relax_events.cli.run_reader import note_unreadable
    from relax_events.history.run_log import RunLog
    from relax_events.ops.model_export.versions import read_versions

    with RunLog(settings, name="export") as log:
        versions = read_versions(log)
        note_unreadable(log)
    return versions


def _newest(settings: RunConfig) -> int:
    from relax_events.history.run_log import RunLog

    with RunLog(settings, name="export") as log:
        return log.newest_version


def _with_base(settings: RunConfig, base: Path) -> RunConfig:
    return settings.model_copy(
        update={"model": settings.model.model_copy(update={"path": base.absolute()})}
    )


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB.

    Raises:
        ConfigError: It is no such size, or 0.
    """
    from relax_events.errors import ConfigError

    found = SIZE.fullmatch(text.strip())
    factor = 1024 if found and found["binary"] else 1000
    size = (
        int(float(found["number"]) * factor ** UNITS.index(found["unit"].upper())) if found else 0
    )
    if size <= 0:
        raise ConfigError(
            f"--max-shard-size must be a size such as 5GB, 500MB or 2GiB, got {text!r}"
        )
    return size


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
