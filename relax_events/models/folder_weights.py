"""Fills a model that was built on device `meta` from its folder: a rank of a sharded model reads
its own rows of each tensor, from mapped files, and no more.

    model on `meta`  ──▶  adapters, sharding  ──▶  rows of the files  ──▶  this rank's pieces

transformers says how the tensors of a folder become a model's: renamed, a layer's experts joined,
dimensions exchanged. Where that keeps the rows of a tensor in their order, as for experts, only
this rank's are read; else one whole tensor at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from relax_events.errors import ConfigError
from relax_events.model_folder.tensors import StoredTensors


@dataclass(slots=True)
class _Source:
    """Where a tensor comes from.

    Attributes:
        converter: Of transformers; None for a stored tensor as it is.
        target: The converter's first tensor.
        names: Stored tensors by the converter's pattern, in its order.
    """

    converter: WeightConverter | None
    target: str
    names: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter: the module that has it and its attribute there, which sharding and adapters
    leave; its name in transformers, and the dtype that its values are rounded to.
    """

    owner: nn.Module
    attribute: str
    name: str
    dtype: torch.dtype


class FolderWeights:
    """The weights of a model without memory."""

    def __init__(self, path: Path, model: PreTrainedModel, *, unused: Collection[str] = ()) -> None:
        """Map the files, compute the model's buffers, and tie what the folder has twice.

        Args:
            path: The model's folder; it has all tensors of the model.
            model: On device `meta`, as transformers built it.
            unused: Names of parameters that are not to be filled.
        Raises:
            ConfigError: Tied tensors differ in the folder; the text names them.
        """
        self._path, self._config = path, model.config
        self._stored = StoredTensors.from_folder(path)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._sources = self._find_sources(model)
        self._tie(model)
        self._compute_buffers(model)
        self._slots = list(self._list_slots(model))
        named = {slot.name for slot in self._slots}
        self.unreadable = sorted(named - self._sources.keys() - set(unused))
        """Parameters of which transformers' rules don't say where they are stored."""

    def _find_sources(self, model: PreTrainedModel) -> dict[str, _Source]:
        """Return the sources of the model's tensors, as transformers' loader finds them."""
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        rename = partial(
            rename_source_key,
            base_model_prefix=model.base_model_prefix,
            meta_state_dict=self._shapes,
        )
        sources: dict[str, _Source] = {}
        for stored in sorted(self._stored, key=dot_natural_key):
            name, pattern = rename(stored, renamings, converters)
            if name not in self._shapes and stored in self._shapes:
                name, pattern = rename(stored, [], [])
            converter = None if pattern is None else by_pattern[pattern]
            source = sources.setdefault(name, _Source(converter, name))
            source.names.setdefault(pattern or stored, []).append(stored)
            first, *others = converter.target_patterns if converter else [name]
            for other in others:
                sources.setdefault(name.replace(first, other), source)
        return sources

    def _tie(self, model: PreTrainedModel) -> None:
        """Tie parameters that are stored twice: transformers does not compare them on `meta`."""
        tied = dict(model.all_tied_weights_keys)
        for pair in tied.items():
            if all(name in self._sources for name in pair):
                first, second = (self._read(name) for name in pair)
                dtype = model.get_parameter(pair[0]).dtype
                if not torch.equal(first.to(dtype), second.to(dtype)):
                    raise ConfigError(describe_untied(self._path, *pair))
        if tied:
            model.tie_weights()

    def _compute_buffers(self, model: PreTrainedModel) -> None:
        """Give the model's buffers memory and values: computed ones, as those of rotary embeddings,
        by its own initialisation.
        """
        for part in model.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, torch.empty_like(buffer, device="cpu"))
                part._is_hf_initialized = False  # type: ignore[assignment]  # noqa: SLF001  # its loader's mark
        model.initialize_weights()
        for name, buffer in model.named_buffers():
            if name in self._sources:
                buffer.copy_(self._read(name))

    def _list_slots(self, model: nn.Module) -> Iterator[_Slot]:
        names: dict[int, list[str]] = {}
        owners: dict[int, tuple[nn.Module, str]] = {}
        for prefix, owner in model.named_modules():
            for attribute, parameter in owner.named_parameters(recurse=False):
                owners.setdefault(id(parameter), (owner, attribute))
                name = f"{prefix}.{attribute}" if prefix else attribute
                names.setdefault(id(parameter), []).append(name)
        for key, (owner, attribute) in owners.items():
            stored = (name for name in names[key] if name in self._sources)
            name = next(stored, names[key][0])
            yield _Slot(owner, attribute, name, owner.get_parameter(attribute).dtype)

    @torch.no_grad()
    def fill(self, module: nn.Module, *, device: torch.device) -> None:
        """Give a model its weights: each parameter that it still has, or this rank's piece of it.
        Parameters that the folder lacks, as of adapters, become zero.

        Args:
            module: The model, its backbone, or a module with it; it may be sharded.
            device: Of this rank.
        Raises:
            ConfigError: A tensor has values that are not finite; the text names it.
        """
        buffers = [
            (part, name, buffer)
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        module.to_empty(device=device)
        for part, name, buffer in buffers:
            setattr(part, name, buffer.to(device))
        slots = {id(getattr(slot.owner, slot.attribute)): slot for slot in self._slots}
        for parameter in module.parameters():
            piece, first = view_piece(parameter)
            slot = slots.get(id(parameter))
            if slot is None:
                piece.zero_()
            elif piece.numel():
                values = self._read(slot.name, first, first + len(piece))
                piece.copy_(values.to(slot.dtype))
                require_finite(self._path, slot.name, piece)

    def _read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows of a tensor of the model, as a view of its file where it is stored so."""
        source, rows = self._sources[name], slice(first, last)
        if source.converter is None:
            stored = next(iter(source.names))
            return self._stored[stored][rows]
        converter = deepcopy(source.converter)
        keeps_rows = _keeps_rows(converter)
        joins = any(isinstance(one, MergeModulelist) for one in converter.operations)
        for pattern, names in source.names.items():
            for stored in names[rows] if keeps_rows and joins else names:
                part = rows if keeps_rows and not joins else slice(None)
                read: Any = partial(self._read_stored, stored, part)
                converter.add_tensor(source.target, stored, pattern, read)
        whole = self._shapes[name]
        num_rows = len(range(*rows.indices(whole[0]))) if keeps_rows else whole[0]
        expected = torch.empty((num_rows, *whole[1:]), device="meta")
        tensors = converter.convert(
            source.target,
            model=SimpleNamespace(get_parameter=lambda _: expected),
            config=self._config,
        )
        values: Tensor = tensors[name][0] if isinstance(tensors[name], list) else tensors[name]
        return values if keeps_rows else values[rows]

    def _read_stored(self, stored: str, rows: slice) -> Tensor:
        return self._stored[stored][rows]


def _keeps_rows(converter: WeightConverter) -> bool:
    """Return whether each row of the result comes from the same row of its sources, or from the
    source of its number.
    """
    return len(converter.target_patterns) == 1 and all(
        (isinstance(one, MergeModulelist) and one.dim == 0)
        or (isinstance(one, Concatenate) and one.dim > 0)
        or (isinstance(one, Transpose) and min(one.dim0, one.dim1) > 0)
        for one in converter.operations
    )


def view_piece(parameter: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a parameter, which share its memory, and the number of the first:
    of one that is not sharded, all.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * rows, parameter.shape[0])
    piece: Tensor = parameter.to_local()
    return piece.detach(), first


def require_finite(path: Path, name: str, weight: Tensor) -> None:
    """Require finite values of a weight of a model's folder, or of a piece of it.

    Raises:
        ConfigError: It has others; the text names it.
    """
    if not weight.detach().sum(dtype=torch.float32).isfinite():
        raise ConfigError(
            f"model.path = {path} holds {name} with NaN or infinite values; use the folder as "
            "it was published"
        )


def describe_untied(path: Path, name: str, other: str) -> str:
    """Return an error's text: a folder's configuration ties tensors, and their values differ."""
    return (
        f"model.path = {path} holds other values for {name} than for {other}, and its "
        "config.json ties them; set tie_word_embeddings = false there, or leave the first "
        "out of the folder"
    )
