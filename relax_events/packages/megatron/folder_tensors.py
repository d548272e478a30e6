"""Reads rectangles of a model folder's tensors by their names in transformers, without reading the
rest.

A folder may hold a layer's experts one by one, where transformers has them fused; or fused, with
the last two dimensions exchanged, as Qwen3-VL publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from relax_events.api.errors import ConfigError
from relax_events.model_folder.tensors import StoredTensors
from relax_events.packages.megatron.layout import Box

THINKER = "thinker."
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class FolderTensors:
    """The tensors of a folder in Hugging Face layout, by their names in transformers."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Map the files.

        Args:
            path: The folder.
            shapes: Of the model's parameters in transformers.
        Raises:
            ConfigError: It holds no weights.
            DamagedTensors: A file of the weights is damaged; the text names it.
        """
        self._path, self._shapes = path, shapes
        self._stored = StoredTensors.from_folder(path)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a rectangle of a tensor, as a view of its file where it is stored whole.

        Raises:
            ConfigError: The folder lacks the tensor, or has it in another shape.
        """
        stored = self._find(name)
        if stored is not None:
            return self._slice(stored, box, self._shapes[name])
        parent, _, kind = name.rpartition(".")
        if kind not in FUSED or len(box) != 3:
            raise ConfigError(f"{self._path} lacks {name}; use the model's folder as published")
        return torch.stack(
            [self._expert(f"{parent}.{expert}.", kind, box[1:]) for expert in range(*box[0])]
        )

    def _expert(self, module: str, kind: str, box: Box) -> Tensor:
        """Return a rectangle of an expert whose matrices are stored one by one."""
        names = FUSED[kind]
        num_rows = self._shapes[f"{module.rpartition('.')[0].rpartition('.')[0]}.{kind}"][1]
        rows = num_rows // len(names)
        parts = []
        for index, part in enumerate(names):
            start, end = (min(max(at - index * rows, 0), rows) for at in box[0])
            if start < end:
                name = f"{module}{part}.weight"
                stored = self._find(name)
                if stored is None:
                    raise ConfigError(
                        f"{self._path} lacks {name}; use the model's folder as published"
                    )
                parts.append(self._slice(stored, ((start, end), box[1]), None))
        return torch.cat(parts)

    def _find(self, name: str) -> str | None:
        return next((one for one in (name, THINKER + name) if one in self._stored), None)

    def _slice(self, stored: str, box: Box, shape: tuple[int, ...] | None) -> Tensor:
        """Return a rectangle of a stored tensor, of the model's shape or its last two dimensions
        exchanged.
        """
        tensor = self._stored[stored]
        if shape not in (None, tuple(tensor.shape)) and tensor.ndim == 3:
            tensor = tensor.transpose(1, 2)
        if shape in (None, tuple(tensor.shape)):
            return tensor[tuple(slice(*ends) for ends in box)]
        raise ConfigError(
            f"{stored} of {self._path} must be {list(shape or ())}, got "
            f"{list(self._stored.raw[stored].layout.shape)}; do config.json and weights belong "
            "together?"
        )
