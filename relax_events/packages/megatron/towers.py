"""The towers of a model that reads images, video or audio: transformers' own modules next to the
decoder's first pipeline stage.

    files ── towers ──▶ features ──┬── replace the placeholders' embeddings
                                   └── deeper ones are added after the first decoder layers

Each rank of the first stage holds the towers whole and encodes all files of a micro-batch, but adds
the features of its own tokens alone: gradients of the towers are summed over the tensor- and
context-parallel ranks, as those of the norms are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from relax_events.api.engines import ProcessedMedia
from relax_events.api.errors import ConfigError
from relax_events.media.towers import concatenate_layers
from relax_events.models.families import Family, MediaFamily
from relax_events.packages.megatron.row import Row


class Towers(nn.Module):
    """The towers by their names in transformers; always in evaluation mode, as in backend
    `torch`.
    """

    def __init__(self, family: MediaFamily, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._family = family
        for name, module in modules.items():
            parent: nn.Module = self
            *outer, last = name.split(".")
            for part in outer:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, module)
        self.eval()

    def train(self, mode: bool = True) -> Towers:
        """Stay in evaluation mode."""
        del mode
        return super().train(False)

    def encode(
        self, pieces: Sequence[ProcessedMedia]
    ) -> tuple[Float[Tensor, "features hidden"], list[Float[Tensor, "features hidden"]]]:
        """Return the features of files: features that replace embeddings, and features that are
        added after the next decoder layers.
        """
        return concatenate_layers(self._family.encode_media(self, pieces))


def build_towers(
    path: Path,
    family: Family,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "sdpa",
) -> Towers | None:
    """Return the towers of the model in a folder without its weights; None where it has none.

    Args:
        path: A folder in Hugging Face layout.
        family: Of the model.
        dtype: Of the weights.
        device: Of the weights.
        attention: Name of an attention implementation that transformers knows.
    Raises:
        ConfigError: transformers can't build a model of this `config.json`.
    """
    if not isinstance(family, MediaFamily):
        return None
    try:
        source = getattr(family.loader, "config_class", None) or AutoConfig
        config = source.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        # what is built of the decoder is thrown away
        text.num_hidden_layers, text.vocab_size = 1, 8
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]
        if hasattr(text, "num_experts"):
            text.num_experts = text.num_experts_per_tok = 1
        text.pad_token_id = None
        with torch.device(device), no_init_weights():
            whole = _from_config(family.loader, config, dtype=dtype, attention=attention)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the towers of the model in {path} can't be built: {error}; use the model's folder as "
            "published"
        ) from error
    names = [name for name in (family.vision_name, family.audio_name) if name]
    return Towers(family, {name: whole.get_submodule(name) for name in names})


def read_tower_shapes(path: Path, family: Family) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the names and shapes of the parameters of a model's towers; none of a text model."""
    meta = torch.device("meta")
    towers = build_towers(path, family, dtype=torch.float32, device=meta)
    if towers is None:
        return ()
    return tuple((name, tuple(one.shape)) for name, one in towers.named_parameters())


def _from_config(loader: Any, config: Any, *, dtype: torch.dtype, attention: str) -> Any:
    if hasattr(loader, "from_config"):
        return loader.from_config(config, dtype=dtype, attn_implementation=attention)
    # what its auto classes call
    return loader._from_config(config, dtype=dtype, attn_implementation=attention)  # noqa: SLF001


class OwnFeatures(NamedTuple):
    """The features of the media tokens of one rank.

    Attributes:
        positions: Of these tokens among the rank's.
        first: Features that replace their embeddings.
        deep: Features that are added after the first decoder layers.
    """

    positions: Int[Tensor, " media_tokens"]
    first: Float[Tensor, "media_tokens hidden"]
    deep: Float[Tensor, "layers media_tokens hidden"]


def encode_own(towers: Towers, row: Row, *, first: int, end: int) -> OwnFeatures | None:
    """Encode the media of a row; None where this rank's tokens have none.

    Args:
        towers: Of the model.
        row: A micro-batch.
        first: The first of this rank's part of the row's own tokens.
        end: Behind its last.
    """
    if row.media is None:
        return None
    at = row.media.positions
    is_own = (at >= first) & (at < end)
    if not is_own.any():
        return None
    features, deep = towers.encode(row.media.pieces)
    index, positions = (
        torch.from_numpy(values[is_own]).to(features.device)
        for values in (row.media.features, at - first)
    )
    layers = [layer.index_select(0, index) for layer in (features, *deep)]
    return OwnFeatures(
        positions,
        layers[0],
        torch.stack(layers[1:]) if deep else layers[0].new_zeros(0, *layers[0].shape),
    )


def add_deep_features(layers: Sequence[nn.Module]) -> None:
    """Let each of the first decoder layers add its features to its output.

    They come in the arguments that megatron-core calls `context` and `context_mask`, which it
    passes through its layers unread, and through layers that are computed again with their
    gradients.
    """
    for index, layer in enumerate(layers):
        layer.register_forward_hook(_adds_feature(index), with_kwargs=True)


def _adds_feature(index: int) -> Any:
    def add(layer: Any, inputs: Any, named: dict[str, Any], output: Any) -> Any:
        del layer, inputs
        deep: Tensor | None = named.get("context")
        if deep is None:
            return None
        hidden, context = output
        added = hidden.index_add(0, named["context_mask"], deep[index][:, None].to(hidden.dtype))
        return added, context

    return add
