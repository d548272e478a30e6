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
from typing import NamedTuple

from torch import Tensor

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.model_folder.tensors import StoredTensors
from relax_events.models.adapter_folder import TENSORS_FILE
from relax_events.models.parameters import read_parameters
from relax_events.ops.model_export.adapters import (
    MODEL_FILES,
    MergedTensors,
    leave_unmerged,
    require_base_folder,
    write_adapters,
)
from relax_events.ops.model_export.base_folder import (
    CARD_FILE,
    copy_small_files,
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
from relax_events.ops.model_export.run_settings import choose_template
from relax_events.ops.model_export.sources import open_weights
from relax_events.ops.model_export.versions import PublishedVersions
from relax_events.weights.tensor_files import Tensors, write_weight_files

MAX_SHARD_BYTES = 5_000_000_000
MODEL, ADAPTERS, MERGED = "model", "adapters", "merged model"
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
        weights_digest: Digest of the version's weights as on the log, hexadecimal.
        content: `model`; of a run with `model.lora` `adapters` or `merged model`.
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
    content: str = MODEL


def export_version(
    config: RunConfig,
    versions: PublishedVersions,
    version: int,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replaces: bool = False,
    merged: bool = False,
    report: Report = lambda _: None,
) -> Export:
    """Write the model folder of a published version; of a run with `model.lora` a folder of its
    adapters.

    Args:
        config: The run; `model.path` is the base model's folder.
        versions: Its versions on the log.
        version: The version.
        target: The folder to write.
        max_shard_bytes: Largest size of a weight file, unless one tensor is larger.
        replaces: Replace an existing model folder.
        merged: Write the whole model with the adapters of `model.lora` merged in.
        report: Called with a line for each stage.
    Raises:
        ConfigError: The folder is not empty, the base model's is not there, or the run has nothing
            to merge.
        VersionLost: The version is not left.
        WeightsError: The version does not fit the base model.
        DamagedTensors: A file of the base model's weights is damaged; the text names it.
        EnvironmentProblem: The folder can't be written.
    """
    base = config.model.path
    _require_other_folder(target, base)
    content = _choose_content(config, merged=merged)
    base_tensors = StoredTensors.from_folder(base)
    with write_folder(target, replaces=replaces) as folder:
        opened = folder / OPENED_FOLDER
        opened.mkdir()
        report(f"reading version {version} of run {config.run.id}")
        # first of all, because a running trainer soon deletes versions older than the newest
        weights = open_weights(config, versions, version, opened)
        require_base_folder(config, weights)
        origin = (weights.digest, weights.kind, read_base_model(base), versions.state)
        lineage = Lineage(config, version, *origin, content=content)
        write = _write_adapters if content == ADAPTERS else _write_model
        sizes = write(
            folder, lineage, weights.tensors, base_tensors, max_shard_bytes, report=report
        )
        shutil.rmtree(opened)
    return Export(
        folder=str(target),
        run_id=config.run.id,
        policy_version=version,
        source=weights.kind,
        base=str(base),
        weights_digest=weights.digest.hex(),
        content=content,
        **sizes._asdict(),
    )


def _require_other_folder(target: Path, base: Path) -> None:
    if target.resolve() == base.resolve():
        raise ConfigError(f"--to {target} is the base model's folder; give another one")


def _choose_content(config: RunConfig, *, merged: bool) -> str:
    """Return the kind of the folder's content.

    Raises:
        ConfigError: `merged` is set, and the run trains the whole model.
    """
    if config.model.lora is not None:
        return MERGED if merged else ADAPTERS
    if merged:
        raise ConfigError(
            f"--merged is for runs with [model.lora], and run {config.run.id} trains the whole "
            "model; leave it out"
        )
    return MODEL


class Sizes(NamedTuple):
    """The counts of the written tensors, files and bytes of an `Export`."""

    num_tensors: int
    num_trained: int
    num_files: int
    num_bytes: int


def _write_adapters(
    folder: Path,
    lineage: Lineage,
    trained: Tensors,
    base: Tensors,
    max_shard_bytes: int,
    *,
    report: Report,
) -> Sizes:
    """Write a folder of adapters with the tokenizer's files, in one file of any size."""
    del base, max_shard_bytes
    config = lineage.config
    template = choose_template(config, lineage.state)
    copy_small_files(config.model.path, folder, chat_template=template, without=MODEL_FILES)
    (folder / CARD_FILE).write_text(render_card(lineage))
    report(f"writing {TENSORS_FILE}")
    num_bytes = write_adapters(
        folder,
        trained,
        read_parameters(config.model.path, config.model),
        config=config,
        base=lineage.base,
    )
    return Sizes(len(trained.layouts), len(trained.layouts), 1, num_bytes)


def _write_model(
    folder: Path,
    lineage: Lineage,
    trained: Tensors,
    base: Tensors,
    max_shard_bytes: int,
    *,
    report: Report,
) -> Sizes:
    """Write a whole model, with the adapters merged in if the version has adapters."""
    config = lineage.config
    parameters = read_parameters(config.model.path, config.model)
    if config.model.lora is not None:
        dtype = str(config.model.dtype)
        trained = MergedTensors(base, trained, lora=config.model.lora, dtype=dtype)
        parameters = leave_unmerged(parameters, trained)
    planned = plan_tensors(base.layouts, trained.layouts, parameters, dtype=config.model.dtype)
    _write_small_files(folder, lineage)
    num_files = write_planned(
        folder, planned, (trained, base), max_shard_bytes=max_shard_bytes, report=report
    )
    num_bytes = sum(tensor.layout.num_bytes for tensor in planned)
    return Sizes(len(planned), count_trained(planned), num_files, num_bytes)


def _write_small_files(folder: Path, lineage: Lineage) -> None:
    """Write everything but the weights."""
    config = lineage.config
    template = choose_template(config, lineage.state)
    copy_small_files(config.model.path, folder, chat_template=template)
    set_dtype(folder, config.model.dtype)
    (folder / CARD_FILE).write_text(render_card(lineage))


def write_planned(
    folder: Path,
    planned: list[ExportedTensor],
    sources: tuple[Tensors, Tensors],
    *,
    max_shard_bytes: int,
    report: Report,
) -> int:
    """Write the weight files, and the index of several; return the number of files.

    Args:
        folder: The folder.
        planned: The tensors, in their order.
        sources: The version's weights, and the base folder's tensors.
        max_shard_bytes: Largest size of a file, unless one tensor is larger.
        report: Called with a line for each file.
    """
    shards = split_into_shards(planned, max_shard_bytes=max_shard_bytes)
    files = [{tensor.name: tensor.layout for tensor in shard} for shard in shards]
    tensors = {tensor.name: tensor for tensor in planned}
    write_weight_files(folder, files, partial(_read_named, tensors, sources), report=report)
    return len(files)


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
