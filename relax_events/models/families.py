"""Model families behind one interface: loading, freezable parts, and forward passes with media.

A text family passes token ids and positions unchanged. A media family encodes each file once with
its towers, replaces the placeholders' embeddings by the features, and passes four rows of
positions: with fewer, transformers silently lets packed sequences attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.media.model_inputs import (
    MediaInputs,
    MediaSequence,
    ProcessedMedia,
    build_media_inputs,
)
from relax_events.media.token_layout import MediaLayout, OmniLayout
from relax_events.media.towers import (
    AudioTower,
    Layers,
    VisionTower,
    concatenate_layers,
    load_feature_extractor,
)


@dataclass(frozen=True, slots=True)
class Family:
    """Models that read text only.

    Attributes:
        layout: Layout of media in a token sequence; None for text models.
        separately: Whether each media file is encoded alone, so that shapes do not depend on other
            files.
        loader: The auto class of transformers.
        parts: Prefixes of parameter names by part; the longest match decides.
    """

    layout: MediaLayout | None = None
    separately: bool = False
    loader: Any = AutoModelForCausalLM
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"language": ("",)})

    def build_inputs(
        self, sequences: Sequence[MediaSequence], *, position_ids: NDArray[np.int64]
    ) -> MediaInputs | None:
        """Build the media inputs of a forward pass, or None without media; see
        `build_media_inputs`.

        Raises:
            PoisonSample: A sequence has media, and the model reads text only.
        """
        named = next((sequence.name for sequence in sequences if sequence.media), None)
        if named is None:
            return None
        if self.layout is None:
            raise PoisonSample(
                f"{named} has media, but the model reads text only; use a model of a "
                "family that reads media"
            )
        return build_media_inputs(sequences, layout=self.layout, position_ids=position_ids)

    def language_model(self, module: Any) -> nn.Module:
        """Return the module that computes hidden states from embeddings."""
        language: nn.Module = module.base_model
        return language

    def remove_head(self, module: PreTrainedModel) -> nn.Module:
        """Return the loaded model without its output head, as `hidden_states` needs it. The
        original must no longer be used.
        """
        return module.base_model

    def hidden_states(
        self,
        module: Any,
        input_ids: Int[Tensor, "rows length"],
        position_ids: Int[Tensor, "rows length"],
        media: MediaInputs | None = None,
        **settings: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        """Run a forward pass without the output head.

        Args:
            module: A model of this family.
            input_ids: The rows.
            position_ids: Positions of text, which count from 0 in each sequence of a row.
            media: Replacements of placeholders; None without media.
            settings: Arguments of the forward pass, such as mask and cache.
        """
        assert media is None, "media were passed to a text family; requests are checked earlier"
        states: Tensor = self.language_model(module)(
            input_ids=input_ids, position_ids=position_ids, **settings
        ).last_hidden_state
        return states

    def decoding_positions(
        self, positions: Int[Tensor, "rows 1"], shifts: Int[Tensor, "rows 1"]
    ) -> Tensor:
        """Return the position ids of one more token in each row.

        Args:
            positions: Index of each token in its row.
            shifts: Rotary position minus index, because of earlier media.
        """
        del shifts
        return positions


@dataclass(frozen=True, slots=True)
class MediaFamily(Family):
    """Models with a vision tower, and optionally an audio tower. Qwen3-VL also adds visual features
    after its first layers.

    Attributes:
        language_name: Name of the module that computes hidden states from embeddings.
        vision_name: Name of the vision tower.
        audio_name: Name of the audio tower; empty without one.
        extractor: Audio feature extractor; None without an audio tower.
    """

    loader: Any = AutoModelForImageTextToText
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "language": ("model.language_model.", "lm_head."),
            "vision": ("model.visual.",),
            "projection": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        }
    )
    language_name: str = "model.language_model"
    vision_name: str = "model.visual"
    audio_name: str = ""
    extractor: Any = None

    def language_model(self, module: Any) -> nn.Module:
        """Return the language model without the towers."""
        language: nn.Module = module.get_submodule(self.language_name)
        return language

    def remove_head(self, module: PreTrainedModel) -> nn.Module:
        """Remove the output head; towers and language model keep their names."""
        del module.lm_head
        return module

    def hidden_states(
        self,
        module: Any,
        input_ids: Int[Tensor, "rows length"],
        position_ids: Int[Tensor, "rows length"],
        media: MediaInputs | None = None,
        **settings: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        """Run a forward pass without the output head; see `Family`."""
        if media is None:
            return Family.hidden_states(self, module, input_ids, position_ids, **settings)
        device = input_ids.device
        cells, index = (
            torch.from_numpy(array).to(device) for array in (media.cells, media.features)
        )
        features, deep = concatenate_layers(self.encode_media(module, media.media))
        embedded = module.get_input_embeddings()(input_ids)
        flat = embedded.flatten(0, 1).index_copy(
            0, cells, features.index_select(0, index).to(embedded.dtype)
        )
        if deep:
            mask = torch.zeros(input_ids.numel(), dtype=torch.bool, device=device)
            mask[cells] = True
            settings |= {
                "visual_pos_masks": mask.view_as(input_ids),
                "deepstack_visual_embeds": [layer.index_select(0, index) for layer in deep],
            }
        output = self.language_model(module)(
            inputs_embeds=flat.view_as(embedded),
            position_ids=torch.cat(
                [position_ids[None], torch.from_numpy(media.positions).to(device)]
            ),
            **settings,
        )
        states: Tensor = output.last_hidden_state
        return states

    def decoding_positions(
        self, positions: Int[Tensor, "rows 1"], shifts: Int[Tensor, "rows 1"]
    ) -> Tensor:
        """Return the position ids of one more token in each row; see `Family`."""
        return torch.stack([positions, *[positions + shifts] * 3])

    def encode_media(self, module: Any, pieces: Sequence[ProcessedMedia]) -> list[Layers]:
        """Encode each file with the towers: its visual input, then its audio input.

        Args:
            module: Holds the towers by their names in a model of this family.
            pieces: The files.
        """
        assert self.layout is not None
        visual, audio = (
            [piece for piece in pieces if getattr(piece, name) is not None]
            for name in ("pixels", "samples")
        )
        visual_layers = (
            VisionTower(
                module.get_submodule(self.vision_name), self.layout.images.geometry, self.separately
            ).encode(visual)
            if visual
            else iter(())
        )
        audio_layers = (
            iter(
                AudioTower(
                    module.get_submodule(self.audio_name), self.extractor, self.separately
                ).encode(audio)
            )
            if audio
            else iter(())
        )
        return [
            layers
            for piece in pieces
            for layers in _take_layers(piece, visual_layers, audio_layers)
        ]


def _take_layers(
    piece: ProcessedMedia, visual_layers: Iterator[Layers], audio_layers: Iterator[Layers]
) -> list[Layers]:
    return [
        next(part)
        for array, part in ((piece.pixels, visual_layers), (piece.samples, audio_layers))
        if array is not None
    ]


def omni_family(path: Path, layout: OmniLayout, *, separately: bool) -> MediaFamily:
    """Return the family of Qwen3-Omni's thinker: its language model is a mixture of experts."""
    return MediaFamily(
        layout=layout,
        separately=separately,
        loader=Qwen3OmniMoeThinkerForConditionalGeneration,
        parts={
            "language": ("model.", "lm_head."),
            "vision": ("visual.",),
            "audio": ("audio_tower.",),
            "projection": (
                "visual.merger.",
                "visual.merger_list.",
                "audio_tower.proj1.",
                "audio_tower.proj2.",
            ),
        },
        language_name="model",
        vision_name="visual",
        audio_name="audio_tower",
        extractor=load_feature_extractor(path),
    )


def read_family(path: Path, config: MediaConfig, *, separately: bool = False) -> Family:
    """Return the family of the model in a folder.

    Args:
        path: A folder in Hugging Face layout.
        config: Preprocessing settings of media.
        separately: See `Family`.
    Raises:
        ConfigError: The model reads media, and its settings for them are missing or not supported.
    """
    layout = MediaLayout.from_folder(path, config)
    if layout is None:
        return Family()
    return (
        omni_family(path, layout, separately=separately)
        if isinstance(layout, OmniLayout)
        else MediaFamily(layout=layout, separately=separately)
    )


def find_part(name: str, *, family: Family) -> str:
    """Return the part of a model that a parameter belongs to, by the longest matching prefix."""
    starts = sorted(
        ((start, part) for part, some in family.parts.items() for start in some),
        key=lambda pair: -len(pair[0]),
    )
    return next((part for start, part in starts if name.startswith(start)), "language")


def require_parts(parts: Sequence[str], *, family: Family) -> None:
    """Require that a model has the parts that are to be frozen.

    Raises:
        ConfigError: It lacks one; the text names it.
    """
    if unknown := [part for part in parts if part not in family.parts]:
        raise ConfigError(
            f"model.frozen names {unknown[0]!r}, but the model's parts are "
            f"{', '.join(family.parts)}; remove it"
        )


def freeze(module: nn.Module, parts: Sequence[str], *, family: Family) -> None:
    """Freeze parts of a model.

    Raises:
        ConfigError: The model has no such part, or nothing is left to train.
    """
    require_parts(parts, family=family)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(find_part(name, family=family) not in parts)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"model.frozen = {list(parts)} leaves nothing to train; remove a part")
