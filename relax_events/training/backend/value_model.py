"""Runs a value model, a policy's architecture with a scalar head: packed micro-batch in, values of
its loss tokens out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from relax_events.config import ModelConfig
from relax_events.media.model_inputs import MediaInputs
from relax_events.models.causal_lm import build_causal_lm, load_causal_lm
from relax_events.models.families import Family, read_family
from relax_events.models.folder_weights import FolderWeights
from relax_events.training.backend.packing_probe import build_probe, isolates_neighbours
from relax_events.training.backend.sharded_parameters import call_with_weights
from relax_events.training.batch.packing import PackedBatch


class ValueNetwork(nn.Module):
    """A model without its output head, and a scalar head initialised to zero."""

    def __init__(self, backbone: nn.Module, *, family: Family, hidden_size: int) -> None:
        """Wrap a backbone, with its dtype and device.

        Args:
            backbone: Of the family, without its head.
            family: Runs the backbone.
            hidden_size: Of the backbone.
        """
        super().__init__()
        self.backbone, self._family = backbone, family
        example = next(backbone.parameters())
        self.weight = nn.Parameter(
            torch.zeros(hidden_size, dtype=example.dtype, device=example.device)
        )
        self.bias = nn.Parameter(torch.zeros(1, dtype=example.dtype, device=example.device))

    def hidden(
        self,
        input_ids: Int[Tensor, "rows length"],
        position_ids: Int[Tensor, "rows length"],
        media: MediaInputs | None = None,
    ) -> Float[Tensor, "rows length hidden"]:
        """Run the backbone."""
        # No mask and no cache: with either, transformers 5 lets packed neighbours attend to each
        # other.
        return self._family.hidden_states(
            self.backbone, input_ids, position_ids, media, attention_mask=None, use_cache=False
        )

    def head(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " tokens"]:
        """Return a value for each hidden state, in at least float32."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Row by row, not a matrix product, whose order of summation depends on how many rows there
        # are.
        values: Tensor = (hidden.to(dtype) * self.weight.to(dtype)).sum(-1) + self.bias.to(dtype)
        return values


class ValueModel:
    """The network on one device. A sample gets a row of its own where two short sequences see each
    other in a common one.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype | None = None,
        prepare: Callable[[nn.Module, object, FolderWeights | None], None] = lambda *_: None,
        is_sharded: bool = False,
    ) -> None:
        """Load the backbone from a folder; nothing is fetched.

        Args:
            path: A causal language model in Hugging Face layout; its output head is not used.
            config: The attention implementation, and the dtype unless another is given.
            device: Where the weights go.
            dtype: Of the weights, for proofs in float64.
            prepare: Called with the network, its decoder layers and its weights.
            is_sharded: See `PolicyModel`.
        Raises:
            ConfigError: The folder is missing, or holds no causal language model.
        """
        self.device = device
        self.dtype = dtype or getattr(torch, config.dtype)
        self.family = read_family(
            path, config.media, separately=True
        )  # other media in the batch change a sample's values by rounding at most
        weights: FolderWeights | None = None
        settings: dict[str, Any] = {"attention": config.attention, "loader": self.family.loader}
        settings |= {"dtype": self.dtype, "needs_head": False}
        if is_sharded:
            loaded, weights = build_causal_lm(path, **settings)
        else:
            loaded = load_causal_lm(path, device=device, **settings)
        self.vocab_size = len(loaded.get_input_embeddings().get_parameter("weight"))
        hidden_size = loaded.config.get_text_config().hidden_size
        layers = getattr(self.family.language_model(loaded), "layers", None)
        self.module = ValueNetwork(
            self.family.remove_head(loaded), family=self.family, hidden_size=hidden_size
        )
        prepare(self.module, layers, weights)
        self.shares_rows = isolates_neighbours(self._probe_positions)

    def token_values(self, batch: PackedBatch) -> Float[Tensor, " loss_tokens"]:
        """Run a micro-batch; return the value at each of its loss tokens, predicted from the tokens
        before it.

        Args:
            batch: From `packing.pack`, with this model's `vocab_size` and `shares_rows`, its media
                added.
        """
        values: Tensor = call_with_weights(self.module, self._compute_values, batch)
        return values

    def _compute_values(self, batch: PackedBatch) -> Float[Tensor, " loss_tokens"]:
        arrays = (batch.input_ids, batch.position_ids, batch.loss_positions)
        input_ids, position_ids, positions = (
            torch.from_numpy(array).to(self.device) for array in arrays
        )
        return self.module.head(
            self.module.hidden(input_ids, position_ids, batch.media)
            .flatten(0, 1)
            .index_select(0, positions)
        )

    def idle_output(self) -> Tensor:
        """Run a micro-batch without samples, on a rank that has none left while others run theirs;
        return a number that does not depend on the weights.
        """
        ids, positions = build_probe([0], vocab_size=self.vocab_size, device=self.device)
        output: Tensor = call_with_weights(
            self.module,
            lambda: self.module.head(self.module.hidden(ids, positions)[0]).sum() * 0.0,
        )
        return output

    def _probe_positions(self, positions: Sequence[int]) -> Float[Tensor, "tokens hidden"]:
        probe = build_probe(positions, vocab_size=self.vocab_size, device=self.device)
        hidden: Tensor = call_with_weights(self.module, lambda: self.module.hidden(*probe)[0])
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
