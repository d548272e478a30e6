"""Let a server accept media that the worker has preprocessed. Imported only by SGLang's processes,
through `plugin`.

SGLang itself downloads and processes files, and expands a prompt's placeholders accordingly. With
other settings it would make other tokens, and tokenizing a prompt again may change it. Its own
interface for preprocessed data accepts tensors, which HTTP can't carry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import Modality as ServerModality
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen3_omni_moe import _get_feat_extract_output_lengths
from torch import Tensor

from relax_events.engines.sglang.media_features import (
    FORMAT,
    PREFIX,
    MediaArray,
    MediaPlacement,
    TokenRange,
    parse_image_data,
)
from relax_events.events.parts import Modality
from relax_events.media.geometry import ImageGeometry
from relax_events.media.towers import cut_patches

GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}


@dataclass(frozen=True, slots=True, eq=False)
class ParsedMedia:
    """A prompt's media, in place of SGLang's own `image_data`."""

    arrays: Sequence[MediaArray]
    placement: MediaPlacement


def read_request(request: Any) -> None:
    """Parse the media of a request for several prompts once, before SGLang splits it into prompts.

    Raises:
        ValueError: They are not in our format; the request is rejected.
    """
    texts = [
        data[0]
        for data in request.image_data or ()
        if isinstance(data, list) and data and isinstance(data[0], str)
    ]
    if not texts or not all(text.startswith(PREFIX) for text in texts):
        return
    try:
        request.image_data = [
            [ParsedMedia(arrays, placement)] for arrays, placement in parse_image_data(texts)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"media of format {FORMAT} can't be read: {error!r}; do server and worker have the "
            "same version?"
        ) from None


async def process_media(
    original: Callable[..., Awaitable[Any]],
    processor: Any,
    *,
    image_data: Any,
    input_text: Any,
    **settings: Any,
) -> Any:
    """Convert a prompt's media to SGLang's types; pass others to SGLang's own method.

    Raises:
        ValueError: They don't match the prompt; the request is rejected.
    """
    if not (image_data and isinstance(image_data[0], ParsedMedia)):
        return await original(processor, image_data=image_data, input_text=input_text, **settings)
    placement, arrays = image_data[0].placement, image_data[0].arrays
    tokens: list[int] = input_text
    if placement.positions.shape != (3, len(tokens)) or len(placement.runs) != len(arrays):
        raise ValueError(
            f"positions of shape {placement.positions.shape} and token ranges of "
            f"{len(placement.runs)} arrays don't match {len(tokens)} tokens and {len(arrays)} "
            "arrays"
        )
    items = [
        _build_item(array, runs, num_tokens=len(tokens))
        for array, runs in zip(arrays, placement.runs, strict=True)
    ]
    return MultimodalProcessorOutput(
        input_ids=tokens,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(tokens, items),
        mm_items=items,
        im_start_id=processor.vision_start_token_id,
        im_end_id=processor.vision_end_token_id,
        im_token_id=processor.mm_tokens.image_token_id,
        video_token_id=processor.mm_tokens.video_token_id,
        audio_token_id=processor.mm_tokens.audio_token_id,
        mrope_positions=torch.from_numpy(placement.positions),
        mrope_position_delta=torch.tensor([[placement.shift]]),
    )


async def add_media_format(original: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Add to the server's state that it accepts media in our format."""
    return [{**state, "media_format": FORMAT} for state in await original(*arguments)]


def clear_feature_cache(flushed: bool, *_: Any, **__: Any) -> bool:
    """Clear the towers' features together with the prefix cache: a request that continues under new
    weights must recompute them.
    """
    if flushed and mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
    return flushed


def _build_item(
    array: MediaArray, runs: Sequence[TokenRange], *, num_tokens: int
) -> MultimodalDataItem:
    """Build SGLang's object; a mismatch of features and tokens would crash the server."""
    feature, num_features, data = (
        _audio_features(array)
        if array.geometry is None
        else _visual_features(array, array.geometry)
    )
    num_positions = sum(last + 1 - first for first, last in runs)
    if num_positions != num_features or not all(
        0 <= first <= last < num_tokens for first, last in runs
    ):
        raise ValueError(
            f"{num_features} features ({array.modality.value}) don't match the token ranges "
            f"{list(runs)} of {num_tokens} tokens"
        )
    item = MultimodalDataItem(
        modality=ServerModality[array.modality.name],
        feature=feature,
        offsets=list(runs),
        model_specific_data=data,
    )
    item.set_identity(array.identity)
    return item


def _visual_features(
    array: MediaArray, geometry: ImageGeometry
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Cut pixels into patches; return them, the number of their features, and the tower's other
    inputs.
    """
    frames = torch.from_numpy(array.values)
    frames = frames if frames.ndim == 4 else frames[None]
    temporal_patches = -(-len(frames) // geometry.temporal_patch_size)
    grid = [temporal_patches, *(side // geometry.patch_size for side in frames.shape[1:3])]
    patches = cut_patches(frames, geometry)
    return (
        patches,
        len(patches) // geometry.merge_size**2,
        {GRIDS[array.modality]: torch.tensor([grid])},
    )


def _audio_features(array: MediaArray) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return a spectrogram, the number of its features, and the tower's other inputs."""
    num_frames = array.values.shape[1]
    num_features = int(_get_feat_extract_output_lengths(torch.tensor(num_frames)))
    return (
        torch.from_numpy(array.values)[None],
        num_features,
        {"feature_attention_mask": torch.ones(1, num_frames, dtype=torch.long)},
    )
