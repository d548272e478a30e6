"""Converts weights between a folder in Hugging Face layout and a distributed checkpoint of
megatron-core: the decoder's weights under megatron-core's names, the weights of towers for images
and audio under `towers.` and their names in transformers.

A distributed checkpoint of any topology has the whole model: megatron-core cuts it when a run
of any tensor, pipeline or expert parallelism loads it. So a conversion has no topology either. It
runs in one process and needs memory for the weights once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_events.api.errors import ConfigError
from relax_events.api.training import MediaConfig, ModelConfig, Topology
from relax_events.model_folder.tensors import StoredTensors, TensorLayout
from relax_events.models.families import Family, read_family
from relax_events.models.parameters import read_parameters
from relax_events.ops.model_export.base_folder import copy_small_files
from relax_events.ops.model_export.export import MAX_SHARD_BYTES, write_planned
from relax_events.ops.model_export.layout import plan_tensors
from relax_events.packages.megatron.folder_tensors import FolderTensors
from relax_events.packages.megatron.layout import TOWERS, Shard, cut, full_shapes, rank_shards
from relax_events.packages.megatron.opening import read_sizes
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.packages.megatron.towers import build_towers

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

METADATA = "metadata.json"
"""In every distributed checkpoint."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A written folder; `num_bytes` is the size of the weights."""

    folder: str
    format: str
    num_tensors: int
    num_bytes: int
    dtype: str


def convert_to_megatron(
    source: Path, folder: Path, *, report: Report = lambda _: None
) -> Conversion:
    """Write the distributed checkpoint of a model folder.

    Configuration and tokenizer are copied next to it.

    Args:
        source: A folder in Hugging Face layout.
        folder: An empty folder, to write.
        report: Called with a line for each stage.
    Raises:
        ConfigError: The model is of no family that can be converted, or megatron-core is missing.
    """
    (sizes, family), dtype = _read_sizes(source), _read_dtype(source)
    shapes = full_shapes(sizes)
    with _whole_model(sizes, dtype) as (model, shards):
        _add_towers(model, source, family, dtype)
        report(f"reading {source}")
        parameters = dict(model.named_parameters())
        tensors = FolderTensors(source, shapes)
        with torch.no_grad():
            for shard in shards:
                for piece in shard.pieces:
                    values = tensors.read(piece.name, piece.source)
                    cut(parameters[shard.name], piece.target).copy_(
                        values[0] if len(piece.source) > len(piece.target) else values
                    )
        report("writing the checkpoint")
        _save(model, folder)
        copy_small_files(source, folder)
    return Conversion(str(folder), "megatron", len(parameters), _num_bytes(shapes, dtype), dtype)


def convert_to_folder(
    source: Path,
    folder: Path,
    *,
    base: Path,
    confine: Callable[[], None] = lambda: None,
    report: Report = lambda _: None,
) -> Conversion:
    """Write a distributed checkpoint as a folder in Hugging Face layout.

    Args:
        source: The checkpoint's folder, with its `metadata.json`.
        folder: An empty folder, to write.
        base: A folder of the same architecture: configuration, tokenizer and the names of the
            tensors are taken from it, and no weights.
        confine: Confines this process; called before it reads the checkpoint.
        report: Called with a line for each stage.
    Raises:
        ConfigError: The checkpoint can't be read or does not fit the base, or megatron-core is
            missing.
    """
    if not (source / METADATA).is_file():
        raise ConfigError(
            f"{source} is no distributed checkpoint, it holds no {METADATA}; give the folder that "
            "megatron-core wrote, as iter_0001000"
        )
    (sizes, family), dtype = _read_sizes(base), _read_dtype(base)
    stored = StoredTensors.from_folder(base)
    shapes = full_shapes(sizes)
    with _whole_model(sizes, dtype) as (model, shards):
        _add_towers(model, base, family, dtype)
        copy_small_files(base, folder)
        report(f"reading {source}")
        confine()
        _load(model, source)
        trained = _ModelTensors(model, shards, shapes, dtype=dtype)
        planned = plan_tensors(
            stored.layouts,
            trained.layouts,
            read_parameters(base, ModelConfig(path=base)),
            dtype=dtype,
        )
        write_planned(
            folder, planned, (trained, stored), max_shard_bytes=MAX_SHARD_BYTES, report=report
        )
    return Conversion(str(folder), "hf", len(planned), _num_bytes(shapes, dtype), dtype)


class _ModelTensors:
    """The weights of a whole model, one tensor at a time."""

    def __init__(
        self,
        model: GPTModel,
        shards: list[Shard],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: str,
    ) -> None:
        self._shapes, self._dtype = shapes, getattr(torch, dtype)
        self._parts: dict[str, list[tuple[Any, Tensor]]] = {}
        parameters = dict(model.named_parameters())
        for shard in shards:
            for piece in shard.pieces:
                part = cut(parameters[shard.name].detach(), piece.target)
                self._parts.setdefault(piece.name, []).append((piece.source, part))
        self.layouts = {name: TensorLayout(dtype, shape) for name, shape in shapes.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in transformers."""
        whole = torch.empty(self._shapes[name], dtype=self._dtype)
        for box, part in self._parts[name]:
            whole[tuple(slice(*ends) for ends in box)] = part
        return whole


def _read_sizes(folder: Path) -> tuple[DecoderSizes, Family]:
    """Read the sizes of decoder and towers, and how the model reads media."""
    family = read_family(folder, MediaConfig())
    return read_sizes(folder, Topology.of(1), family), family


def _read_dtype(folder: Path) -> str:
    """Return the dtype of a folder's weights."""
    names = {layout.dtype for layout in StoredTensors.from_folder(folder).layouts.values()}
    if len(names) > 1:
        raise ConfigError(
            f"{folder} holds weights in {' and '.join(sorted(names))}, and a conversion keeps one "
            "dtype; save the model in one by transformers"
        )
    return names.pop()


def _num_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    item: int = getattr(torch, dtype).itemsize
    return item * sum(prod(shape) for shape in shapes.values())


@contextmanager
def _whole_model(sizes: DecoderSizes, dtype: str) -> Iterator[tuple[GPTModel, list[Shard]]]:
    """Build the decoder whole in this process, which is its only rank."""
    try:
        from relax_events.packages.megatron import building
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise ConfigError(
            "`relax models export --format` needs megatron-core, which is not installed; install "
            "relax-events[megatron]"
        ) from error
    from relax_events.packages.megatron.cpu import cuda_calls_on_cpu

    whole = Topology.of(1)
    with cuda_calls_on_cpu(), building.single_rank():
        config = building.build_config(sizes, whole, dtype=getattr(torch, dtype), on_cpu=True)
        shards = list(rank_shards(sizes, whole, whole.at(0)))
        yield building.build_model(sizes, config), shards


def _add_towers(model: GPTModel, path: Path, family: Family, dtype: str) -> None:
    """Add the towers of the model in a folder, without values."""
    cpu = torch.device("cpu")
    towers = build_towers(path, family, dtype=getattr(torch, dtype), device=cpu)
    if towers is not None:
        model.add_module(TOWERS, towers)


def _save(model: GPTModel, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))


def _load(model: GPTModel, folder: Path) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from relax_events.packages.megatron.foreign_checkpoint.loading import load_foreign_checkpoint

    try:
        loaded = load_foreign_checkpoint({"model": model.sharded_state_dict()}, folder)
    except (CheckpointingException, ValueError, KeyError, RuntimeError) as error:
        raise _unfitting(folder, error) from error
    except CheckpointException as error:  # torch's, which no `except Exception` catches
        cause, _ = next(iter(error.failures.values()))
        raise cause if isinstance(cause, ConfigError) else _unfitting(folder, cause) from error
    model.load_state_dict(loaded["model"], strict=False)


def _unfitting(folder: Path, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{folder} can't be loaded as the model in --base: {error}; give a base of the same "
        "architecture"
    )
