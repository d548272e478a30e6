"""The causal language model of the engine: prefill, decoding, weight updates. Only this module
calls the model, which transformers' modules compute (ADR 61).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from relax_events.config import ModelConfig
from relax_events.engines.transformers.kv_cache import RowCache
from relax_events.errors import ConfigError
from relax_events.events.routed_experts import ExpertShape
from relax_events.media.model_inputs import MediaSequence
from relax_events.media.token_layout import MediaLayout
from relax_events.models import layers as attention
from relax_events.models.adapter_folder import read_adapter_tensors
from relax_events.models.adapters import Adapters, published_parameters, replace_version
from relax_events.models.causal_lm import attention_kinds, load_causal_lm, open_device
from relax_events.models.families import read_family
from relax_events.models.layers import ROW_BLOCK, use_padded_experts
from relax_events.models.offload import Offload
from relax_events.models.routers import Routers, split_rows

FULL, LINEAR = "full_attention", "linear_attention"
LINEAR_MODELS = ("qwen3_5_text", "qwen3_5_moe_text")
"""Model types with linear attention whose states the engine's cache can hold."""
VECTOR_BYTES = 128
"""Widest vector of a CPU's element-wise kernels. They compute the remainder element by element, and
round functions such as `sigmoid` differently there.
"""


class CausalModel:
    """A model whose weights are on a device, or offloaded to the CPU."""

    def __init__(self, path: Path, *, config: ModelConfig) -> None:
        """Load the model from a folder; nothing is downloaded.

        Raises:
            ConfigError: The folder is missing or holds no causal language model that this engine
                can serve.
        """
        self.device = open_device(config.device)
        self.family = read_family(path, config.media, separately=True)
        implementation = attention.register() if config.attention == "sdpa" else config.attention
        dtype = getattr(torch, config.dtype)
        self._module = load_causal_lm(
            path,
            attention=implementation,
            dtype=dtype,
            device=self.device,
            loader=self.family.loader,
        )
        self._offload: Offload | None = None
        self._adapters = Adapters.for_model(self._module, config, family=self.family, path=path)
        self._head: nn.Module = self._module.get_output_embeddings()
        self.vocab_size = len(self._module.get_input_embeddings().get_parameter("weight"))
        _require_known_attention(self._module, path)
        if self.device.type == "cpu":
            use_padded_experts(self._module)
        self._routers = (
            Routers(self.family.language_model(self._module), path=path)
            if config.replays_routing
            else None
        )
        self._require_linear_head(path)

    @property
    def pads_prompts(self) -> bool:
        """Whether prompts can be padded: padding after a prompt would change a recurrent state."""
        return attention_kinds(self._module) == {FULL}

    @property
    def row_block(self) -> int:
        """Rows of a decoding step must be a multiple of this, so that the output of every layer
        fills whole vectors; a gate has one value per row.
        """
        if self.device.type != "cpu":
            return ROW_BLOCK
        num_values = VECTOR_BYTES // self._module.dtype.itemsize
        widths = {
            part.out_features
            for part in self.family.language_model(self._module).modules()
            if isinstance(part, nn.Linear)
        }
        return max(ROW_BLOCK, *(num_values // math.gcd(num_values, width) for width in widths))

    @property
    def layout(self) -> MediaLayout | None:
        """Layout of media in the token sequence; None if the model reads text only."""
        return self.family.layout

    @property
    def experts(self) -> ExpertShape | None:
        """The shape of recorded expert choices; None if they are not recorded."""
        return None if self._routers is None else self._routers.shape

    def routed_experts(
        self, *, num_rows: int
    ) -> Integer[np.ndarray, "rows length layers top_k"] | None:
        """Return the experts of each token of the last forward, padding included; None if they are
        not recorded.
        """
        return None if self._routers is None else split_rows(self._routers.take_choices(), num_rows)

    def prefill(
        self,
        input_ids: Int[Tensor, "prompts length"],
        last: Int[Tensor, " prompts"],
        sequences: Sequence[MediaSequence] = (),
    ) -> tuple[Float[Tensor, "prompts vocabulary"], DynamicCache]:
        """Prefill whole prompts, padded on the right; return the logits after each prompt's last
        token, and the cache.

        Args:
            input_ids: Prompts. They may be padded only if the model `pads_prompts`.
            last: Index of each prompt's last token.
            sequences: The same prompts with their media; empty if no prompt has any.
        """
        positions = torch.arange(input_ids.shape[1], device=self.device).expand_as(input_ids)
        rows = torch.arange(len(last), device=self.device)
        cache = DynamicCache(config=self._module.config)
        media = self.family.build_inputs(
            sequences, position_ids=np.tile(np.arange(input_ids.shape[1]), (len(input_ids), 1))
        )
        hidden = self.family.hidden_states(
            self._module, input_ids, positions, media, past_key_values=cache, use_cache=True
        )
        return self._logits(hidden[rows, last]), cache

    def decode(
        self,
        tokens: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        cache: RowCache,
        *,
        num_tokens: int,
        shifts: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows vocabulary"]:
        """Decode one token in each row; return the logits after it.

        Args:
            tokens: The newest token of each row. Their number must be a multiple of `row_block`:
                CPU kernels round one to three rows differently than more.
            positions: Index of each token in its row.
            cache: The earlier tokens of the rows; `tokens` are added to it.
            num_tokens: Attention length; a multiple of 16 above all positions.
            shifts: Rotary position minus index, because of media.
        """
        cache.begin_step(positions, num_tokens=num_tokens)
        seen = torch.arange(num_tokens, device=self.device) <= positions[:, None]
        mask = torch.where(seen, 0.0, float("-inf")).to(self._module.dtype)[:, None, None]
        output = self.family.language_model(self._module)(
            input_ids=tokens[:, None],
            position_ids=self.family.decoding_positions(positions[:, None], shifts[:, None]),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        return self._logits(output.last_hidden_state[:, 0])

    def with_effective_adapters(self) -> AbstractContextManager[None]:
        """Give adapters that have no effect yet one within the block; without adapters this does
        nothing.
        """
        return nullcontext() if self._adapters is None else self._adapters.randomised()

    def read_weights(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights of a folder onto the CPU, in this model's dtype; where this model has
        adapters, the folder's adapters.

        Raises:
            ConfigError: The folder is missing or holds no model, or no adapters, of this family.
        """
        if self._adapters is not None:
            return read_adapter_tensors(folder)
        other = load_causal_lm(
            folder,
            attention="eager",
            dtype=self._module.dtype,
            device=torch.device("cpu"),
            loader=self.family.loader,
        )
        return _parameters(other)

    def replace_weights(self, tensors: Mapping[str, Tensor], *, base_digest: bytes = b"") -> None:
        """Load other weights of the same model, by Hugging Face name, or other adapters of it; on
        an error the old ones stay.

        Args:
            tensors: By name.
            base_digest: Of the adapters' base model; empty for whole weights, or where unknown.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape, or the base model is
                another one; the text names it.
        """
        replace_version(self._module, self._adapters, tensors, base_digest=base_digest)

    def offload_to(self, folder: Path) -> None:
        """Let `offload` free the memory of the CPU too, in favour of a file in this folder."""
        self._offload = Offload(folder)

    def offload(self) -> None:
        """Free the device's memory; the weights are kept on the host."""
        if self._offload is not None:
            self._offload.move_away(self._module.parameters())
        else:
            self.free_device()

    def reload(self) -> None:
        """Undo `offload`."""
        if self._offload is not None:
            self._offload.bring_back()
        nn.Module.to(self._module, self.device)

    def free_device(self) -> None:
        """Move the weights to the CPU, if they are elsewhere, and release the device's memory."""
        if self.device.type != "cpu":
            self._module.cpu()
            torch.cuda.empty_cache()

    def _logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocabulary"]:
        num_rows = len(hidden)
        padding = -num_rows % ROW_BLOCK
        logits: Tensor = self._head(nn.functional.pad(hidden, (0, 0, 0, padding)))
        return logits[:num_rows]

    @torch.inference_mode()
    def _require_linear_head(self, path: Path) -> None:
        ids = torch.arange(5, device=self.device)[None] % self.vocab_size
        expected = self._module(input_ids=ids, use_cache=False).logits
        hidden = self.family.language_model(self._module)(
            input_ids=ids, use_cache=False
        ).last_hidden_state
        if not torch.allclose(self._head(hidden), expected, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"the model in {path} computes its logits by more than a linear head (scaling, "
                "soft caps), which the engine does not support"
            )


def _require_known_attention(module: PreTrainedModel, path: Path) -> None:
    supported_kinds = (
        {FULL, LINEAR} if module.config.get_text_config().model_type in LINEAR_MODELS else {FULL}
    )
    if other := attention_kinds(module) - supported_kinds:
        raise ConfigError(
            f"the model in {path} has layers of type {min(other)}, but engine 'transformers' "
            f"supports {FULL}, and {LINEAR} for models of type {' and '.join(LINEAR_MODELS)}; "
            "choose another engine"
        )


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in published_parameters(module).items()}
