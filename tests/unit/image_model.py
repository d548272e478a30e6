"""A tiny model that reads images, image files, prompts with them, and the same computed by
transformers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_requests import fresh_sample
from numpy.typing import NDArray
from PIL import Image
from small_settings import small_run
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from relax_events.config import (
    DataConfig,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
)
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    FinishReason,
    MediaRef,
    Modality,
    SampleKey,
)
from relax_events.events.types import SampleReady
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import read_modality
from relax_events.packages.examples.tiny_models import make_tiny
from tests.folders import kept_folder

BOUNDS = MediaConfig()
Sizes = tuple[tuple[int, int], ...]
SIZES: dict[int, Sizes] = {
    0: ((32, 32),),
    1: ((64, 48), (32, 96)),
    2: (),
    3: ((100, 70),),
    4: ((32, 32), (32, 32), (48, 48)),
}
PIXELS_PER_TOKEN = 16 * 16


@cache
def build_image_model(seed: int = 3) -> Path:
    """Write a tiny random model once in a test process, and delete it at its end."""
    folder = kept_folder("images")
    return make_tiny(
        folder / "model",
        corpus=["red", "blue", "What is it?"],
        family="qwen3_vl",
        hidden_size=32,
        seed=seed,
    )


def image_run(folder: Path, **sections: Mapping[str, Any]) -> RunConfig:
    """Make the run file of a run on the tiny model; its caches and objects are in the folder."""
    tree: dict[str, Any] = {
        "run": {"id": "images", "directory": folder},
        "model": {"path": build_image_model(), "device": "cpu"},
        "data": {"source": "synthetic_images:colour"},
        "trainer": {"learning_rate": 1e-2},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return small_run(tree)


def image_file(width: int, height: int, *, seed: int = 0, kind: str = "PNG") -> bytes:
    """Draw coarse noise, as a file."""
    coarse = (
        np.random.default_rng(seed)
        .integers(0, 255, (max(1, height // 8), max(1, width // 8), 3))
        .astype(np.uint8)
    )
    file = BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST).save(file, kind)
    return file.getvalue()


def image_item(width: int, height: int, *, seed: int = 0) -> MediaItem:
    """Name an image as a row does."""
    return MediaItem(
        Modality.IMAGE, image_file(width, height, seed=seed), f"rows:{width}x{height}/{seed}"
    )


def question(*references: MediaRef) -> list[ChatMessage]:
    """Make a prompt about media, with text before, between and after them."""
    parts = [
        part
        for ref in references
        for part in (ContentPart(Modality.TEXT, "so "), ContentPart(read_modality(ref), media=ref))
    ]
    return [ChatMessage("user", [*parts, ContentPart(Modality.TEXT, "What is it?")])]


def prompt_of(
    media: Sequence[ProcessedMedia], *, path: Path | None = None, bounds: MediaConfig = BOUNDS
) -> NDArray[np.int32]:
    """Render the question about media."""
    renderer = PromptRenderer.from_folder(
        path or build_image_model(), DataConfig(source="synthetic_images:colour"), media=bounds
    )
    return renderer.prompt_tokens(question(*(piece.reference for piece in media)))


def image_engine(path: Path | None = None, **settings: Any) -> TransformersEngine:
    """Open an engine on one CPU thread."""
    path = path or build_image_model()
    config = EngineConfig(
        **{"threads": 1, "max_running_samples": 16, "max_context_tokens": 256} | settings
    )
    return TransformersEngine(
        path, config=config, model=ModelConfig(dtype="float32", path=path, device="cpu")
    )


def load_images(
    library: MediaLibrary, *sizes: tuple[int, int], seed: int = 0
) -> tuple[ProcessedMedia, ...]:
    """Put images of some sizes into a library, and load them as the inputs of the model."""
    references = [
        library.add(image_item(*size, seed=seed + index)) for index, size in enumerate(sizes)
    ]
    return tuple(library.load(reference) for reference in references)


@cache
def plain_model(path: Path) -> Any:
    """Load a model without any code of ours, in float64."""
    return AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    ).eval()


def plain_pixels(files: Sequence[bytes]) -> Mapping[str, Any]:
    """Process files by transformers' own processor."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=8,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={
            "shortest_edge": BOUNDS.image_min_token_num * PIXELS_PER_TOKEN,
            "longest_edge": BOUNDS.image_max_token_num * PIXELS_PER_TOKEN,
        },
    )
    found: Mapping[str, Any] = processor(
        [Image.open(BytesIO(file)) for file in files], return_tensors="pt"
    )
    return found


def plain_logprobs(
    tokens: NDArray[Any], files: Sequence[bytes], *, path: Path | None = None
) -> NDArray[np.float64]:
    """Compute the log-probability of every token but the first from one whole forward by
    transformers alone."""
    path = path or build_image_model()
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    kinds = (
        ids == AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<|image_pad|>")
    ).int()
    inputs = dict(plain_pixels(files), mm_token_type_ids=kinds) if files else {}
    with torch.no_grad():
        logits = plain_model(path)(input_ids=ids, use_cache=False, **inputs).logits[0]
    result: NDArray[np.float64] = (
        logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    )
    return result


def request_for(
    number: int, library: MediaLibrary, *, num_samples: int = 2, max_new_tokens: int = 6
) -> GenerationRequest:
    """Request a prompt group whose number determines all its contents, images included."""
    media = load_images(library, *SIZES[number], seed=10 * number)
    return request_about(number, media, num_samples=num_samples, max_new_tokens=max_new_tokens)


def request_about(
    number: int, media: tuple[ProcessedMedia, ...], *, num_samples: int = 2, max_new_tokens: int = 6
) -> GenerationRequest:
    """Request a prompt group about these images."""
    return GenerationRequest(
        prompt_group_id=f"g{number}",
        prompt_tokens=prompt_of(media),
        samples=tuple(
            fresh_sample(f"g{number}/{index}", 1000 * number + index)
            for index in range(num_samples)
        ),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens),
        stop_token_ids=(),
        media=media,
    )


def ready(request: GenerationRequest, generated: GeneratedSample, index: int) -> SampleReady:
    """Make a generated sample what the trainer takes."""
    tokens = np.concatenate([request.prompt_tokens, generated.tokens])
    mask = (np.arange(len(tokens)) >= len(request.prompt_tokens)).astype(np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[len(request.prompt_tokens) :] = generated.logprobs
    return SampleReady(
        key=SampleKey(
            sample_id=generated.sample_id,
            prompt_group_id=request.prompt_group_id,
            sample_index=index,
            samples_per_prompt=len(request.samples),
            train_step=0,
            group_index=0,
            attempt=0,
            row=0,
            policy_version=1,
            min_policy_version=1,
            max_policy_version=1,
        ),
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        advantages=np.ones(len(tokens), np.float32),
        reward=0.0,
        temperature=1.0,
        num_prompt_tokens=len(request.prompt_tokens),
        finish_reason=FinishReason.LENGTH,
        media=[piece.reference for piece in request.media],
    )
