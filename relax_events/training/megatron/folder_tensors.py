"""Reads rectangles of a model folder's tensors by their names in transformers, without reading the
rest.

A folder may hold a layer's experts one by one, where transformers has them fused; or fused, with
the last two dimensions exchanged, as Qwen3-VL publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax_events.errors import ConfigError
from relax_events.training.megatron.layout import Box

THINKER = "thinker."
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class FolderTensors:
    """The tensors of a folder in Hugging Face layout; the files stay open until it is closed."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Open the files.

        Args:
            path: The folder.
            shapes: Of the model's parameters in transformers.
        Raises:
            ConfigError: It holds no weights that can be read.
        """
        self._path, self._shapes = path, shapes
        self._files: dict[str, Any] = {}
        self._opened = ExitStack()
        for file in sorted(path.glob("*.safetensors")):
            try:
                opened = self._opened.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{file} can't be read: {error}; use the model's folder as published"
                ) from None
            self._files |= dict.fromkeys(opened.keys(), opened)
        if not self._files:
            raise ConfigError(
                f"{path} holds no *.safetensors file; use the model's folder as published"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def read(self, name: str, box: Box) -> Tensor:
        """Return a rectangle of a tensor.

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
        return next((one for one in (name, THINKER + name) if one in self._files), None)

    def _slice(self, stored: str, box: Box, shape: tuple[int, ...] | None) -> Tensor:
        """Return a rectangle of a stored tensor, of the model's shape or its last two dimensions
        exchanged.
        """
        part = self._files[stored].get_slice(stored)
        found = tuple(part.get_shape())
        if shape is None or found == shape:
            rectangle: Tensor = part[tuple(slice(*ends) for ends in box)]
            return rectangle
        if len(shape) == 3 and found == (shape[0], shape[2], shape[1]):
            exchanged: Tensor = part[tuple(slice(*box[axis]) for axis in (0, 2, 1))]
            return exchanged.transpose(1, 2)
        raise ConfigError(
            f"{stored} of {self._path} must be {list(shape)}, got {list(found)}; do config.json "
            "and weights belong together?"
        )
