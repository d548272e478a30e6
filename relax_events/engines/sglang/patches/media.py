"""Takes media into a server as the worker has processed them. Imported by SGLang's processes alone,
by way of `plugin`.

SGLang's own way is to fetch and process files, and to expand a prompt's placeholders by what comes
out. Other settings there would be other tokens, and a prompt that is tokenized again is another
one. Its way for data that are processed already takes tensors, which HTTP has not.
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
    HEAD,
    Place,
    Placing,
    ShownArray,
    read,
)
from relax_events.events.parts import Modality
from relax_events.media.geometry import PictureGeometry
from relax_events.media.towers import clip_patches

GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A prompt's media, in the place of SGLang's own `image_data`."""

    shown: Sequence[ShownArray]
    placing: Placing


def read_request(request: Any) -> None:
    """Read the media of a request for several prompts once, before it is taken apart into prompts.

    Raises:
        ValueError: They are not of our form; the request is refused.
    """
    texts = [
        data[0]
        for data in request.image_data or ()
        if isinstance(data, list) and data and isinstance(data[0], str)
    ]
    if not texts or not all(text.startswith(HEAD) for text in texts):
        return
    try:
        request.image_data = [[Taken(shown, placing)] for shown, placing in read(texts)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"media of format {FORMAT} can't be read: {error!r}; are server and worker of "
            "one version?"
        ) from None


async def processed(
    original: Callable[..., Awaitable[Any]],
    processor: Any,
    *,
    image_data: Any,
    input_text: Any,
    **settings: Any,
) -> Any:
    """Give a prompt's media in SGLang's form; those that are not ours go the usual way.

    Raises:
        ValueError: They don't fit the prompt; the request is refused.
    """
    if not (image_data and isinstance(image_data[0], Taken)):
        return await original(processor, image_data=image_data, input_text=input_text, **settings)
    placing, shown = image_data[0].placing, image_data[0].shown
    tokens: list[int] = input_text
    if placing.positions.shape != (3, len(tokens)) or len(placing.runs) != len(shown):
        raise ValueError(
            f"positions of shape {placing.positions.shape} and {len(placing.runs)} places "
            f"don't fit {len(tokens)} tokens"
        )
    items = [
        _item(array, runs, num_tokens=len(tokens))
        for array, runs in zip(shown, placing.runs, strict=True)
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
        mrope_positions=torch.from_numpy(placing.positions),
        mrope_position_delta=torch.tensor([[placing.shift]]),
    )


async def with_mark(original: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Let the server say of itself that it takes media in our form."""
    return [{**state, "media_format": FORMAT} for state in await original(*arguments)]


def forget_features(flushed: bool, *_: Any, **__: Any) -> bool:
    """Drop the towers' features with the prefix cache: those of a request that goes on under new
    weights are to be made anew.
    """
    if flushed and mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
    return flushed


def _item(array: ShownArray, runs: Sequence[Place], *, num_tokens: int) -> MultimodalDataItem:
    """Make SGLang's object; features without a token, or tokens without a feature, would end the
    server.
    """
    feature, num_features, data = (
        _heard(array) if array.geometry is None else _seen(array, array.geometry)
    )
    num_places = sum(last + 1 - first for first, last in runs)
    if num_places != num_features or not all(
        0 <= first <= last < num_tokens for first, last in runs
    ):
        raise ValueError(
            f"{num_features} features ({array.modality.value}) don't fit into the places "
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


def _seen(array: ShownArray, geometry: PictureGeometry) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Cut pixels; return patches, how many features the tower makes of them, and what else it
    takes.
    """
    frames = torch.from_numpy(array.values)
    frames = frames if frames.ndim == 4 else frames[None]
    moments = -(-len(frames) // geometry.temporal_patch_size)
    grid = [moments, *(side // geometry.patch_size for side in frames.shape[1:3])]
    patches = clip_patches(frames, geometry)
    return (
        patches,
        len(patches) // geometry.merge_size**2,
        {GRIDS[array.modality]: torch.tensor([grid])},
    )


def _heard(array: ShownArray) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the same of a spectrum."""
    num_frames = array.values.shape[1]
    num_features = int(_get_feat_extract_output_lengths(torch.tensor(num_frames)))
    return (
        torch.from_numpy(array.values)[None],
        num_features,
        {"feature_attention_mask": torch.ones(1, num_frames, dtype=torch.long)},
    )
