"""Model families behind one interface: how they load, what of them can be frozen, and how a forward takes media.

A family that reads text alone takes token ids and positions as they are. One that reads pictures lets its vision tower look at every
piece once, puts the features in the place of the placeholders' embeddings, and gives four rows of positions: with fewer, transformers
lets packed sequences attend to each other without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.models.geometry import PictureGeometry
from relax_events.models.media_inputs import MediaInputs, MediaSequence, media_inputs
from relax_events.models.media_layout import MediaLayout

BRIGHTEST = 255.0


@dataclass(frozen=True, slots=True)
class Family:
    """Models that read text alone.

    Attributes:
        layout: How media stand in a sequence; None where they can't.
        apart: Look at each piece of media by itself, so that its features are the same bits whatever it stands beside.
        loader: What of transformers makes such a model.
        parts: Beginnings of parameter names by part; where several fit, the longest says where a parameter belongs.
    """

    layout: MediaLayout | None = None
    apart: bool = False
    loader: Any = AutoModelForCausalLM
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"language": ("",)})

    def inputs(self, sequences: Sequence[MediaSequence], *, position_ids: NDArray[np.int64]) -> MediaInputs | None:
        """Lay out the media of a forward's sequences; None where there are none. For the arguments and errors see `media_inputs`.

        Raises:
            PoisonSample: A sequence brings media, and the model reads text alone.
        """
        named = next((sequence.name for sequence in sequences if sequence.media), None)
        if named is None:
            return None
        if self.layout is None:
            raise PoisonSample(f"{named} brings media, and the model reads text alone; take a model of a family that reads pictures")
        return media_inputs(sequences, layout=self.layout, position_ids=position_ids)

    def language(self, module: PreTrainedModel) -> nn.Module:
        """Return what computes hidden states from embeddings."""
        return module.base_model

    def hidden(
        self,
        module: PreTrainedModel,
        input_ids: Int[Tensor, "rows length"],
        position_ids: Int[Tensor, "rows length"],
        media: MediaInputs | None = None,
        **settings: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        """Run a forward without the output head.

        Args:
            module: Of this family.
            input_ids: The rows.
            position_ids: Of text: what stands in a row counts from 0 in each sequence.
            media: What stands in for placeholders; None where nothing does.
            settings: For the forward, such as the mask and the cache.
        """
        assert media is None, "a family that reads text alone was handed media; requests are checked before"
        states: Tensor = module.base_model(input_ids=input_ids, position_ids=position_ids, **settings).last_hidden_state
        return states

    def decoding_positions(self, positions: Int[Tensor, "rows 1"], shifts: Int[Tensor, "rows 1"]) -> Tensor:
        """Return the position ids of one more token in each row.

        Args:
            positions: Their places in the rows.
            shifts: How far the rotary position is from the place, because of media before it.
        """
        del shifts
        return positions


@dataclass(frozen=True, slots=True)
class PictureFamily(Family):
    """Models with a vision tower whose features also go into the first layers, as Qwen3-VL."""

    loader: Any = AutoModelForImageTextToText
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "language": ("model.language_model.", "lm_head."),
            "vision": ("model.visual.",),
            "projection": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        }
    )

    def language(self, module: PreTrainedModel) -> nn.Module:
        """Return the model without its vision tower."""
        return module.base_model.get_submodule("language_model")

    def hidden(
        self,
        module: PreTrainedModel,
        input_ids: Int[Tensor, "rows length"],
        position_ids: Int[Tensor, "rows length"],
        media: MediaInputs | None = None,
        **settings: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        """Run a forward without the output head; see `Family`."""
        if media is None:
            return Family.hidden(self, module, input_ids, position_ids, **settings)
        base: Any = module.base_model
        device = input_ids.device
        cells, index = (torch.from_numpy(array).to(device) for array in (media.cells, media.features))
        features, deep = self._features(base.visual, media)
        embedded = base.get_input_embeddings()(input_ids)
        flat = embedded.flatten(0, 1).index_copy(0, cells, features.index_select(0, index).to(embedded.dtype))
        mask = torch.zeros(input_ids.numel(), dtype=torch.bool, device=device)
        mask[cells] = True
        output = base.language_model(
            inputs_embeds=flat.view_as(embedded),
            position_ids=torch.cat([position_ids[None], torch.from_numpy(media.positions).to(device)]),
            visual_pos_masks=mask.view_as(input_ids),
            deepstack_visual_embeds=[layer.index_select(0, index) for layer in deep],
            **settings,
        )
        states: Tensor = output.last_hidden_state
        return states

    def decoding_positions(self, positions: Int[Tensor, "rows 1"], shifts: Int[Tensor, "rows 1"]) -> Tensor:
        """Return the position ids of one more token in each row; see `Family`."""
        return torch.stack([positions, *[positions + shifts] * 3])

    def _features(self, tower: Any, media: MediaInputs) -> tuple[Float[Tensor, "features hidden"], list[Float[Tensor, "features hidden"]]]:
        """Let the tower look at every piece, and give what goes before the first layer and into the next ones."""
        assert self.layout is not None
        geometry, weight = self.layout.geometry, next(tower.parameters())
        patches = [picture_patches(torch.from_numpy(piece.pixels).to(weight.device), geometry).to(weight.dtype) for piece in media.media]
        grids = [[1, *(side // geometry.patch_size for side in piece.pixels.shape[:2])] for piece in media.media]
        looks = [slice(index, index + 1) for index in range(len(patches))] if self.apart else [slice(None)]
        seen = [tower(torch.cat(patches[look]), grid_thw=torch.tensor(grids[look], device=weight.device), return_dict=True) for look in looks]
        deep = [torch.cat(layers) for layers in zip(*(one.deepstack_features for one in seen), strict=True)]
        return torch.cat([one.pooler_output for one in seen]), deep


def picture_patches(pixels: UInt8[Tensor, "height width 3"], geometry: PictureGeometry) -> Float[Tensor, "patches values"]:
    """Cut a picture into normalised patches, those of a token next to each other, each repeated over the time that a patch spans.

    Source: `Qwen2VLImageProcessor` of transformers.
    """
    patch, merge = geometry.patch_size, geometry.merge_size
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    mean, std = (torch.tensor(values, device=pixels.device) for values in (geometry.mean, geometry.std))
    normal = (pixels.float() / BRIGHTEST - mean) / std
    cut = normal.view(rows, merge, patch, columns, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
    still = cut[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, geometry.temporal_patch_size, -1, -1)
    return still.reshape(rows * columns * merge * merge, -1)


def family_of(path: Path, config: MediaConfig, *, apart: bool = False) -> Family:
    """Return the family of the model in a folder.

    Args:
        path: A folder in Hugging Face layout.
        config: How pictures are shown to it.
        apart: See `Family`.
    Raises:
        ConfigError: It reads pictures, and its settings for them are missing or not known.
    """
    layout = MediaLayout.from_folder(path, config)
    return Family() if layout is None else PictureFamily(layout=layout, apart=apart)


def freeze(module: nn.Module, parts: Sequence[str], *, family: Family) -> None:
    """Exempt parts of a model from training.

    Raises:
        ConfigError: The model has no such part, or nothing is left to train.
    """
    if unknown := [part for part in parts if part not in family.parts]:
        raise ConfigError(f"model.frozen names {unknown[0]!r}, and the model's parts are {', '.join(family.parts)}; leave it out")
    starts = sorted(((start, part) for part, some in family.parts.items() for start in some), key=lambda pair: -len(pair[0]))
    for name, parameter in module.named_parameters():
        part = next((part for start, part in starts if name.startswith(start)), "language")
        parameter.requires_grad_(part not in parts)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"model.frozen = {list(parts)} leaves nothing to train; leave a part out")
