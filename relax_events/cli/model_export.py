"""`relax models export`: the model of a run or of a folder, in a form that other programs load."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relax_events.cli.output import print_fields, print_progress
from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions, Output

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.ops.model_export.export import Export
    from relax_events.ops.model_export.versions import PublishedVersions

SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B", re.IGNORECASE)
UNITS = ("", "K", "M", "G", "T")
ATTEMPTS = 5
"""Newest versions that are tried while a running trainer deletes them."""


def export(
    source: str,
    *,
    to: Path,
    format: Literal["", "hf", "megatron"] = "",  # noqa: A002  # the option's name
    version: int | None = None,
    best: str = "",
    base: Path | None = None,
    max_shard_size: str = "5GB",
    merged: bool = False,
    force: bool = False,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """Write the model of a run as a folder that transformers, SGLang and `relax serve` load, during
    the run or after it; or convert a model's folder from or to a checkpoint of megatron-core.

    Example: relax models export quickstart --to exported && relax models export Qwen3-4B
        --to Qwen3-4B-megatron --format megatron

    A conversion keeps the bits of every weight. The checkpoint holds the whole model: megatron-core
    loads it in any tensor, pipeline and expert parallelism. The families are Qwen3, Qwen3-VL, their
    mixtures of experts, and the thinker of Qwen3-Omni, whose towers for images and audio are stored
    under `towers.` by their names in transformers.

    The newest version is exported unless --version or --best names another. What was not trained
    comes from the base model's folder, `model.path` of the run.

    Args:
        source: Id of the run, or its run file; with --format the folder to convert.
        to: The folder to write.
        format: Convert a folder to this form: megatron from Hugging Face's layout, or hf from a
            distributed checkpoint.
        version: The policy version.
        best: Metric of the evaluations whose best version is exported, as reward_mean or
            gsm8k/pass_at_4; without a dataset the mean over those that have it.
        base: The base model's folder, where it is no longer at `model.path`; with --format hf a
            model folder from which configuration, tokenizer and the tensors' names are taken.
        max_shard_size: Largest size of a weight file, as 5GB or 500MB.
        merged: Of a run with model.lora, write the whole model with its adapters merged in, not a
            folder of adapters.
        force: Replace a model folder that is there.
    """
    if format:
        from relax_events.errors import ConfigError
        from relax_events.packages.megatron.model_conversion import convert_model

        if version is not None or best or merged or force:
            raise ConfigError("--format converts a folder; --version and the like are of a run")
        print_fields(convert_model(Path(source), to, format=format, base=base), output)
        return
    from relax_events.ops.model_export.new_folder import require_free

    choice: dict[str, Any] = {"version": version, "best": best, "merged": merged, "replaces": force}
    max_shard_bytes = parse_size(max_shard_size)
    require_free(to.resolve(), replaces=force)
    with broker.open_run(source, name="export") as settings:
        settings = settings if base is None else _with_base(settings, base)
        done = _export(settings, to, max_shard_bytes=max_shard_bytes, **choice)
    print_fields(asdict(done), output)


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
            return export_version(described, versions, chosen, to, report=print_progress, **options)
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

    match = SIZE.fullmatch(text.strip())
    factor = 1024 if match and match["binary"] else 1000
    size = (
        int(float(match["number"]) * factor ** UNITS.index(match["unit"].upper())) if match else 0
    )
    if size <= 0:
        raise ConfigError(
            f"--max-shard-size must be a size such as 5GB, 500MB or 2GiB, got {text!r}"
        )
    return size
