"""Merges a version's adapters into the base model for SGLang servers, which load whole models.

A server that adds adapters itself would serve them under names of its own, and its checksums cover
the base weights alone. Merged weights are verified like any others. In bfloat16 merging rounds:
the server's policy differs from the trainer's by the rounding, which the trainer measures as
`mismatch_kl`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax_events.config import LoRAConfig, ModelConfig
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.errors import WeightsError
from relax_events.models.adapter_merge import adapter_names, list_adapted_modules, merge_matrix
from relax_events.models.base_digest import compute_base_digest, require_same_base
from relax_events.weights import Weights


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """How adapters become the weights of a whole model.

    Attributes:
        folder: The base model.
        lora: Their rank and scale.
        dtype: Dtype of the weights in trainer and server.
        base_digest: Digest of the base model's folder.
    """

    folder: ModelFolder
    lora: LoRAConfig
    dtype: torch.dtype
    base_digest: bytes

    @classmethod
    def from_folder(cls, folder: ModelFolder, model: ModelConfig) -> AdapterMerge:
        """Return how adapters are merged into the model of a folder."""
        assert model.lora is not None, "called for a run without adapters"
        return cls(
            folder, model.lora, getattr(torch, model.dtype), compute_base_digest(folder.path)
        )

    def apply(self, weights: Weights) -> dict[str, Tensor]:
        """Return the merged weights under the tensor names of the folder.

        Raises:
            WeightsError: The adapters are another model's, or no adapters; the text names the
                tensor.
        """
        require_same_base(
            weights.base_digest,
            self.base_digest,
            folder=self.folder.path,
            what=f"policy version {weights.policy_version} has adapters of",
        )
        tensors = self.folder.tensors()
        for module in list_adapted_modules(weights.tensors):
            down, up = (weights.tensors[name] for name in adapter_names(module))
            name = f"{module}.weight"
            shape = (len(up), *down.shape[1:])
            if name not in tensors or tensors[name].shape != shape:
                raise WeightsError(
                    f"the base model has no {name} of shape {shape}, which policy version "
                    f"{weights.policy_version} has an adapter for; set model.path to the trainer's"
                )
            base = tensors[name].to(self.dtype)
            tensors[name] = merge_matrix(base, down, up, scaling=self.lora.scaling)
        return self.folder.match_tensors(tensors)
