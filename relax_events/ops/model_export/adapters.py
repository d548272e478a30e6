"""Exports of a run with adapters: a folder of adapters, or the base model's tensors with the
adapters merged in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from relax_events.config import LoRAConfig, RunConfig
from relax_events.errors import WeightsError
from relax_events.model_folder.tensors import TensorLayout
from relax_events.models.adapter_folder import CONFIG_FILE, TENSORS_FILE, render_adapter_config
from relax_events.models.adapter_merge import adapter_names, list_adapted_modules, merge_matrix
from relax_events.models.adapters import peft_name
from relax_events.models.base_digest import compute_base_digest
from relax_events.models.parameters import ModelParameters
from relax_events.ops.model_export.base_folder import BaseModel
from relax_events.ops.model_export.layout import REMEDY, THINKER, natural_order
from relax_events.ops.model_export.sources import VersionWeights
from relax_events.weights.tensor_files import Tensors, write_tensor_file

MODEL_FILES = ("config.json", "generation_config.json")
"""Small files of the base model that would let a folder of adapters look like a whole model's."""


class MergedTensors:
    """The weights of the modules with adapters, merged; implements `Tensors`."""

    def __init__(self, base: Tensors, adapters: Tensors, *, lora: LoRAConfig, dtype: str) -> None:
        """Find the matrices that adapters are added to.

        Args:
            base: The tensors of the base folder.
            adapters: The published tensors of the version.
            lora: Their rank and scale.
            dtype: Of the run's weights, in which the trainer computes.
        Raises:
            WeightsError: A module with an adapter is not in the base folder; the text names it.
        """
        self._base, self._adapters, self._scaling = base, adapters, lora.scaling
        base_names = {name.removeprefix(THINKER): name for name in base.layouts}
        self._sources: dict[str, tuple[str, str]] = {}
        self.layouts: dict[str, TensorLayout] = {}
        for module in list_adapted_modules(adapters.layouts):
            name = f"{module}.weight"
            if name not in base_names:
                raise WeightsError(
                    f"the base folder has no {name}, which the version has an adapter for; {REMEDY}"
                )
            self._sources[name] = base_names[name], module
            self.layouts[name] = TensorLayout(dtype, base.layouts[base_names[name]].shape)

    def read(self, name: str) -> Tensor:
        """Return a merged matrix, rounded once to the run's dtype; see `Tensors`."""
        source, module = self._sources[name]
        down, up = (
            self._adapters.read(part).to(_dtype(self._adapters.layouts[part].dtype))
            for part in adapter_names(module)
        )
        base = self._base.read(source).to(_dtype(self.layouts[name].dtype))
        return merge_matrix(base, down, up, scaling=self._scaling)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def leave_unmerged(parameters: ModelParameters, merged: Tensors) -> ModelParameters:
    """Return the parameters with all but the merged ones as frozen: the base folder has them."""
    return replace(parameters, frozen=frozenset(parameters.shapes.keys() - merged.layouts.keys()))


def require_base_folder(config: RunConfig, weights: VersionWeights) -> None:
    """Require the base model that the version's adapters were trained on.

    Raises:
        WeightsError: Its folder holds another one.
    """
    trained_digest = weights.base_digest
    if (
        trained_digest
        and (folder_digest := compute_base_digest(config.model.path)) != trained_digest
    ):
        raise WeightsError(
            "the version's adapters were trained on a base model with digest "
            f"{trained_digest.hex()}, and {config.model.path} has {folder_digest.hex()}; {REMEDY}"
        )


def write_adapters(
    folder: Path,
    adapters: Tensors,
    parameters: ModelParameters,
    *,
    config: RunConfig,
    base: BaseModel,
) -> int:
    """Write `adapter_config.json` and `adapter_model.safetensors`; return the bytes of the tensors.

    Args:
        folder: The folder; exists.
        adapters: The published tensors of the version.
        parameters: Of the base model.
        config: The run.
        base: The name of the base model, and whether it is on the hub.
    Raises:
        WeightsError: The version holds something else than adapters.
    """
    lora = config.model.lora
    assert lora is not None, "called for a run without adapters"
    modules = list_adapted_modules(adapters.layouts)
    by_name = {peft_name(name): name for name in sorted(adapters.layouts, key=natural_order)}
    layouts = {name: adapters.layouts[trained_name] for name, trained_name in by_name.items()}
    write_tensor_file(folder / TENSORS_FILE, layouts, lambda name: adapters.read(by_name[name]))
    text = render_adapter_config(
        lora,
        base=base.name if base.is_on_hub else str(config.model.path.absolute()),
        target_modules=shorten_targets(modules, parameters),
        is_causal_lm=not base.is_multimodal,
    )
    (folder / CONFIG_FILE).write_bytes(text)
    return sum(layout.num_bytes for layout in layouts.values())


def shorten_targets(modules: Iterable[str], parameters: ModelParameters) -> list[str]:
    """Return the last parts of the modules' names where they fit no other module of the model, as
    other programs expect them, else the whole names.
    """
    targets = set(modules)
    short = {module.rpartition(".")[2] for module in targets}
    matrices = {
        name.removesuffix(".weight")
        for name, shape in parameters.shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    fitting = {module for module in matrices if module.rpartition(".")[2] in short}
    return sorted(short if fitting == targets else targets)
