"""Video and audio files, and small models that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from shutil import copytree
from typing import Any

import av
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from relax_events.config import MediaConfig, RunConfig
from relax_events.events.parts import Modality
from relax_events.media.items import MediaItem
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import read_modality
from relax_events.packages.examples.synthetic_media import encode_video, encode_wav
from relax_events.packages.examples.tiny_models import make_tiny
from tests.folders import kept_folder
from tests.unit.image_model import image_file, image_run, plain_model

OMNI = "qwen3_omni_moe_thinker"
SMALL: dict[str, Any] = {"video_min_token_num": 4, "video_max_token_num": 64}
"""Frames of tests are small, and stay so."""
KINDS = {
    Modality.IMAGE: ((32, 32), (64, 48)),
    Modality.VIDEO: ((32, 32, 4), (48, 32, 9)),
    Modality.AUDIO: (0.4, 1.13),
}
"""Two sizes of each: width and height; with frames, two a second; seconds."""


def frames_of(width: int, height: int, count: int, *, seed: int = 0) -> list[NDArray[np.uint8]]:
    """Draw smooth frames that differ: compression loses little of them."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    slopes = generator.uniform(-1, 1, (count, 3, 2))
    return [
        np.clip(
            128 + np.stack([slope[0] * x + slope[1] * y for slope in frame], -1) * 2, 0, 255
        ).astype(np.uint8)
        for frame in slopes
    ]


def video_file(width: int = 32, height: int = 32, count: int = 4, *, seed: int = 0) -> bytes:
    """Write a silent video of two frames a second."""
    return encode_video(frames_of(width, height, count, seed=seed))


def video_with_audio_file(width: int, height: int, count: int, *, seed: int = 0) -> bytes:
    """Write a video of two frames a second, with a tone that the seed chooses."""
    return written(
        "aac",
        "mp4",
        frames=frames_of(width, height, count, seed=seed),
        rate=2,
        audio=tone(300 + 50 * seed, count / 2),
    )


def written(
    codec: str,
    container: str,
    *,
    frames: Sequence[NDArray[np.uint8]] = (),
    rate: int = 4,
    key_every: int = 12,
    audio: NDArray[Any] | None = None,
    hertz: int = 16_000,
) -> bytes:
    """Write frames, or audio, or both, with any codec of the library.

    The codec of frames with audio is MPEG-4.
    """
    file = BytesIO()
    with av.open(file, "w", format=container) as out:
        video_stream = audio_stream = None
        if frames:
            video_stream: Any = out.add_stream(codec if audio is None else "mpeg4", rate=rate)
            video_stream.height, video_stream.width, video_stream.pix_fmt = (
                *frames[0].shape[:2],
                "yuv420p",
            )
            video_stream.codec_context.gop_size = key_every
        if audio is not None:
            audio_stream: Any = out.add_stream(codec, rate=hertz, layout="mono")
        for frame in frames:
            out.mux(video_stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if audio is not None:
            whole = av.AudioFrame.from_ndarray(
                (audio * 20_000).astype(np.int16)[None], format="s16", layout="mono"
            )
            whole.rate = hertz
            out.mux(audio_stream.encode(whole))
        for stream in (video_stream, audio_stream):
            if stream is not None:
                out.mux(stream.encode())
    return file.getvalue()


def tone(hertz: float, seconds: float, *, rate: int = 16_000) -> NDArray[np.float64]:
    """Play one note."""
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def audio_file(seconds: float = 0.4, *, seed: int = 0) -> bytes:
    """Write noise over a tone that the seed chooses."""
    noise = np.random.default_rng(seed).standard_normal(round(seconds * 16_000))
    return encode_wav(0.3 * tone(200 + 50 * seed, seconds) + 0.05 * noise)


def file_of(modality: Modality, size: Any, *, seed: int = 0) -> bytes:
    """Make a file of one of the sizes in `KINDS`."""
    if modality is Modality.AUDIO:
        return audio_file(size, seed=seed)
    return (
        video_with_audio_file(*size, seed=seed)
        if modality is Modality.VIDEO
        else image_file(*size, seed=seed)
    )


def item_of(modality: Modality, size: Any, *, seed: int = 0) -> MediaItem:
    """Name a file as a row does."""
    return MediaItem(
        modality, file_of(modality, size, seed=seed), f"rows:{modality.value}/{size}/{seed}"
    )


@cache
def omni_model(seed: int = 3) -> Path:
    """Write a tiny random model that reads images, video and audio, once in a test process."""
    return make_tiny(
        kept_folder("media") / "model",
        corpus=["red", "do", "What is it?"],
        family=OMNI,
        hidden_size=32,
        seed=seed,
    )


@cache
def whole_omni_model(seed: int = 3) -> Path:
    """Write the same model once in a test process as Qwen3-Omni is published: as a part of another
    one."""
    path = copytree(omni_model(seed=seed), kept_folder("media") / "model")
    thinker, tensors = (
        json.loads((path / "config.json").read_text()),
        load_file(path / "model.safetensors"),
    )
    whole = {
        "model_type": "qwen3_omni_moe",
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "thinker_config": thinker,
    }
    (path / "config.json").write_text(json.dumps(whole))
    named = {f"thinker.{name}": tensor for name, tensor in tensors.items()} | {
        "code2wav.weight": torch.ones(2)
    }
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    return path


@cache
def expert_model(seed: int = 3) -> Path:
    """Write a tiny random model that sees, with a mixture of experts, once in a test process."""
    return make_tiny(
        kept_folder("media") / "model",
        corpus=["red", "What is it?"],
        family="qwen3_vl_moe",
        hidden_size=32,
        seed=seed,
    )


@cache
def hybrid_model(seed: int = 3) -> Path:
    """Write a tiny random model that sees, with linear attention in one of two layers, once in a
    test process."""
    return make_tiny(
        kept_folder("media") / "model",
        corpus=["red", "What is it?"],
        family="qwen3_5",
        hidden_size=32,
        seed=seed,
    )


@cache
def hybrid_expert_model(seed: int = 3) -> Path:
    """Write one like it, with a mixture of experts, once in a test process."""
    return make_tiny(
        kept_folder("media") / "model",
        corpus=["red", "What is it?"],
        family="qwen3_5_moe",
        hidden_size=32,
        seed=seed,
    )


def media_run(
    folder: Path, path: Path, *, sections: Mapping[str, Any] | None = None, **media: Any
) -> RunConfig:
    """Make the run file of a run on a model."""
    return image_run(folder, model={"path": path, "media": SMALL | media}, **(sections or {}))


@cache
def plain_omni(path: Path) -> Any:
    """Load the model without any code of ours, in float64."""
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    ).eval()


def plain_inputs(
    path: Path, media: Sequence[ProcessedMedia], *, audio_in_video: bool = False
) -> dict[str, Any]:
    """Make the inputs of transformers' own forward for media items, of which at most one has audio."""
    inputs: dict[str, Any] = {}
    for modality, names in (
        (Modality.IMAGE, ("pixel_values", "image_grid_thw")),
        (Modality.VIDEO, ("pixel_values_videos", "video_grid_thw")),
    ):
        frames_of_pieces = [
            piece.pixels if piece.pixels.ndim == 4 else piece.pixels[None]
            for piece in media
            if read_modality(piece.reference) is modality
        ]
        if frames_of_pieces:
            cut = [plain_patches(frames) for frames in frames_of_pieces]
            grids = [
                [-(-len(frames) // 2), frames.shape[1] // 8, frames.shape[2] // 8]
                for frames in frames_of_pieces
            ]
            inputs |= dict(zip(names, (torch.cat(cut), torch.tensor(grids)), strict=True))
    samples_of_pieces = [piece.samples for piece in media if piece.samples is not None]
    if samples_of_pieces:
        spectrum = WhisperFeatureExtractor.from_pretrained(path)(
            samples_of_pieces,
            sampling_rate=16_000,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        inputs |= {
            "input_features": spectrum["input_features"].double(),
            "feature_attention_mask": spectrum["attention_mask"],
        }
    if "video_grid_thw" in inputs:
        inputs |= {
            "video_second_per_grid": torch.ones(len(inputs["video_grid_thw"])),
            "use_audio_in_video": audio_in_video,
        }
    return inputs


def plain_patches(frames: NDArray[np.uint8]) -> torch.Tensor:
    """Make a video's patches by transformers' own processor."""
    videos = (torch.from_numpy(frames).permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.5
    patches, *_ = Qwen3VLVideoProcessor.patchify(
        None, videos[None], patch_size=8, merge_size=2, temporal_patch_size=2
    )
    return patches[0]


def plain_media_logprobs(
    path: Path,
    tokens: NDArray[Any],
    media: Sequence[ProcessedMedia],
    *,
    audio_in_video: bool = False,
) -> NDArray[np.float64]:
    """Compute the log-probability of every token but the first from one whole forward by
    transformers alone."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    inputs = plain_inputs(path, media, audio_in_video=audio_in_video)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if path == omni_model():
        model, inputs["attention_mask"] = plain_omni(path), torch.ones_like(ids)
        model.rope_deltas = None
    else:
        model = plain_model(path)
        kinds = [
            (ids == tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>")).int()
            for name in ("image", "video")
        ]
        inputs = {
            name: value
            for name, value in inputs.items()
            if name not in ("video_second_per_grid", "use_audio_in_video")
        }
        inputs["mm_token_type_ids"] = kinds[0] + 2 * kinds[1]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    result: NDArray[np.float64] = (
        logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    )
    return result


BOUNDS = MediaConfig(**SMALL)
