"""Writes the model folder of a policy version.

    weights of the version (store, or checkpoint) ─┐
    tensors and files of the base folder ──────────┼─▶ .DIR.part ── renamed, whole ──▶ DIR
    steps and evaluations on the log ──────────────┘

The weights are read tensor by tensor from mapped files. Until everything is written and on the disk
the folder has another name, so a killed export leaves no folder that looks whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson
from torch import Tensor

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.models.parameters import read_parameters
from relax_events.ops.model_export.base_folder import (
    CARD_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    copy_small_files,
    open_base_tensors,
    read_base_model,
    set_dtype,
)
from relax_events.ops.model_export.card import Lineage, render_card
from relax_events.ops.model_export.layout import (
    ExportedTensor,
    TrainedPart,
    count_trained,
    plan_tensors,
    split_into_shards,
)
from relax_events.ops.model_export.new_folder import write_folder
from relax_events.ops.model_export.sources import open_weights
from relax_events.ops.model_export.versions import PublishedVersions
from relax_events.weights.tensor_files import Tensors, write_tensor_file

MAX_SHARD_BYTES = 5_000_000_000
OPENED_FOLDER = ".weights"
"""In the unfinished folder: the files that the weights are read from."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Export:
    """A written model folder.

    Attributes:
        folder: The folder.
        run_id: The run.
        policy_version: The version in it.
        source: `weights` or `checkpoint`.
        base: The base model's folder.
        num_tensors: Tensors in the folder; `num_trained` of them hold weights of the version, the
            others the base model's.
        num_files: Weight files.
        num_bytes: Size of the weights.
        weights_digest: SHA-256 of the version's weights as on the log, hexadecimal.
    """

    folder: str
    run_id: str
    policy_version: int
    source: str
    base: str
    num_tensors: int
    num_trained: int
    num_files: int
    num_bytes: int
    weights_digest: str


def export_version(
    config: RunConfig,
    versions: PublishedVersions,
    version: int,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replaces: bool = False,
    report: Report = lambda _: None,
) -> Export:
    """Write the model folder of a published version.

    Args:
        config: The run; `model.path` is the base model's folder.
        versions: What the log says of its versions.
        version: The version.
        target: The folder to write.
        max_shard_bytes: Largest size of a weight file, unless one tensor is larger.
        replaces: Replace a model folder that is there.
        report: Called with a line for each stage.
    Raises:
        ConfigError: The folder is not empty, or the base model's is not there.
        VersionLost: The version is not left.
        WeightsError: The version does not fit the base model.
        EnvironmentProblem: The folder can't be written.
    """
    base = config.model.path
    if target.resolve() == base.resolve():
        raise ConfigError(f"--to {target} is the base model's folder; give another one")
    base_tensors = open_base_tensors(base)
    with write_folder(target, replaces=replaces) as folder:
        opened = folder / OPENED_FOLDER
        opened.mkdir()
        report(f"reading version {version} of run {config.run.id}")
        # first of all, because a running trainer soon deletes what is not among the newest
        weights = open_weights(config, versions, version, opened)
        planned = _plan(config, base_tensors, weights.tensors)
        shards = list(split_into_shards(planned, max_shard_bytes=max_shard_bytes))
        lineage = Lineage(
            config, version, weights.digest, weights.kind, read_base_model(base), versions.state
        )
        _write_small_files(folder, lineage)
        _write_shards(folder, shards, (weights.tensors, base_tensors), report=report)
        shutil.rmtree(opened)
    return Export(
        folder=str(target),
        run_id=config.run.id,
        policy_version=version,
        source=weights.kind,
        base=str(base),
        num_tensors=len(planned),
        num_trained=count_trained(planned),
        num_files=len(shards),
        num_bytes=sum(tensor.layout.num_bytes for tensor in planned),
        weights_digest=weights.digest.hex(),
    )


def _plan(config: RunConfig, base: Tensors, trained: Tensors) -> list[ExportedTensor]:
    """Plan the folder's tensors: their names, layouts, and whether they come from `trained`."""
    parameters = read_parameters(config.model.path, config.model)
    return plan_tensors(base.layouts, trained.layouts, parameters, dtype=config.model.dtype)


def _write_small_files(folder: Path, lineage: Lineage) -> None:
    """Write everything but the weights."""
    config = lineage.config
    copy_small_files(config.model.path, folder, chat_template=config.data.chat_template_file)
    set_dtype(folder, config.model.dtype)
    (folder / CARD_FILE).write_text(render_card(lineage))


def _write_shards(
    folder: Path,
    shards: list[list[ExportedTensor]],
    sources: tuple[Tensors, Tensors],
    *,
    report: Report,
) -> None:
    """Write the weight files, and the index of several.

    Args:
        folder: The folder.
        shards: The tensors of each file.
        sources: The version's weights, and the base folder's tensors.
        report: Called with a line for each file.
    """
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        report(f"writing {name}")
        tensors = {tensor.name: tensor for tensor in shard}
        write_tensor_file(
            folder / name,
            {tensor.name: tensor.layout for tensor in shard},
            partial(_read_named, tensors, sources),
        )
        files |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(tensor.layout.num_bytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX_FILE).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


def _read_named(
    tensors: Mapping[str, ExportedTensor], sources: tuple[Tensors, Tensors], name: str
) -> Tensor:
    """Return a tensor of the folder from the version's weights, or from the base folder."""
    trained, base = sources
    source = tensors[name].source
    return base.read(name) if source is None else take_part(trained.read(source.name), source)


def take_part(tensor: Tensor, part: TrainedPart) -> Tensor:
    """Return the part of a published tensor that is one tensor of the folder, as a view."""
    if part.expert is not None:
        index, num_parts = part.row_part
        tensor = tensor[part.expert].chunk(num_parts)[index]
    return tensor.transpose(1, 2) if part.is_transposed else tensor
