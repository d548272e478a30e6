"""Write tiny models of real architectures with random weights, for pipelines on two CPU cores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Tokenizer,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relax_events.api.errors import ConfigError
from relax_events.api.events import Modality
from relax_events.media.token_layout import MEDIA_FAMILIES
from relax_events.packages.examples.tiny_tokenizer import NUM_BYTES, train_tokenizer

HEAD_DIM = 16
MAX_CONTEXT_TOKENS = 4096
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
MROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
HYBRID: dict[str, Any] = {
    "head_dim": 2 * HEAD_DIM,  # RoPE rotates a quarter of it
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
"""Every second layer has full attention, the others have linear attention."""
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_vl": MROPE,
    "qwen3_vl_moe": EXPERTS | MROPE,
    "qwen3_omni_moe_thinker": EXPERTS | MROPE,
    "qwen3_5": HYBRID,
    "qwen3_5_moe": EXPERTS | HYBRID | {"shared_expert_intermediate_size": 32},
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 1024, "longest_edge": 4_194_304},
}
"""The image and video preprocessor of a tiny model: a token is 16 x 16 pixels."""
AUDIO_EXTRACTOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "padding_value": 0.0,
    "dither": 0.0,
    "return_attention_mask": True,
}
"""The audio feature extractor of a tiny model, the same as that of the full-size model."""

NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""Names of the placeholders in the `tokenizer_config.json` of an audio model; its processor in
transformers requires them."""


def make_tiny(
    path: Path,
    *,
    corpus: Iterable[str],
    family: str = "qwen3",
    hidden_size: int = 64,
    num_layers: int = 2,
    vocab_size: int = NUM_BYTES,
    phrases: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a tiny random model and its own tokenizer in Hugging Face layout, and return the
    folder.

    The same arguments give the same files, byte for byte. Model files in `path` are replaced.

    Args:
        path: The folder; made if missing.
        corpus: Texts that the tokenizer is trained on.
        family: `qwen3` or `qwen3_moe`; `qwen3_vl`, `qwen3_vl_moe`, `qwen3_5` or `qwen3_5_moe`,
            which read images and videos; `qwen3_omni_moe_thinker`, which also reads audio.
        hidden_size: Width of the model, a multiple of 32.
        num_layers: Decoder layers.
        vocab_size: Byte symbols and merges of the tokenizer; special tokens and phrases come on
            top.
        phrases: Texts that become one token each.
        seed: Seed of the random weights.
    Raises:
        ConfigError: The family is unknown, or a size is invalid.
    """
    if family not in FAMILY_SETTINGS:
        raise ConfigError(
            f"model family {family!r} is unknown; choose one of {', '.join(FAMILY_SETTINGS)}"
        )
    if hidden_size < 2 * HEAD_DIM or hidden_size % (2 * HEAD_DIM):
        raise ConfigError(
            f"hidden_size must be a multiple of {2 * HEAD_DIM}, got {hidden_size}; set it to "
            "32, 64, 96, ..."
        )
    if vocab_size < NUM_BYTES:
        raise ConfigError(
            f"vocab_size must be >= {NUM_BYTES} (one symbol per byte), got {vocab_size}; "
            "raise vocab_size"
        )
    tokenizer = train_tokenizer(corpus, vocab_size=vocab_size, phrases=phrases)
    model = _random_model(
        _config(tokenizer, family=family, hidden_size=hidden_size, num_layers=num_layers),
        tokenizer,
        seed=seed,
    )
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if family in MEDIA_FAMILIES:
        processor = PREPROCESSOR | (AUDIO_EXTRACTOR if _reads_audio(family) else {})
        (path / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    if family in MEDIA_FAMILIES and _reads_audio(family):
        settings = path / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | NAMED_TOKENS, indent=2))
    return path


def _reads_audio(family: str) -> bool:
    return Modality.AUDIO in MEDIA_FAMILIES[family].MODALITIES


def _config(
    tokenizer: Qwen2Tokenizer, *, family: str, hidden_size: int, num_layers: int
) -> PreTrainedConfig:
    num_heads = hidden_size // HEAD_DIM
    language: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        # The usual 0.02 is for widths of thousands; at width 64 learning takes several times as
        # long with it.
        "initializer_range": 1 / math.sqrt(hidden_size),
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **FAMILY_SETTINGS[family],
    }
    settings = (
        _add_towers(language, tokenizer, reads_audio=_reads_audio(family))
        if family in MEDIA_FAMILIES
        else language
    )
    config: PreTrainedConfig = AutoConfig.for_model(family, **settings)
    return config


def _add_towers(
    language: dict[str, Any], tokenizer: Qwen2Tokenizer, *, reads_audio: bool
) -> dict[str, Any]:
    """Return the settings of a language model with a vision tower and optionally an audio tower."""
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    names |= (
        {
            f"audio{part}_token_id": f"<|audio_{part[1:] or 'pad'}|>"
            for part in ("", "_start", "_end")
        }
        if reads_audio
        else {}
    )
    width = language["hidden_size"] // 2
    tower = {
        "depth": 2,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": width // HEAD_DIM,
        "patch_size": PREPROCESSOR["patch_size"],
        "spatial_merge_size": PREPROCESSOR["merge_size"],
        "temporal_patch_size": PREPROCESSOR["temporal_patch_size"],
        "out_hidden_size": language["hidden_size"],
        "num_position_embeddings": 64,
        "initializer_range": 1 / math.sqrt(width),
    }
    if "full_attention_interval" not in language:
        tower["deepstack_visual_indexes"] = [0, 1][: language["num_hidden_layers"]]
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    settings = {
        "text_config": language,
        "vision_config": tower,
        "tie_word_embeddings": False,
        **tokens,
    }
    if reads_audio:
        settings |= {
            "audio_config": _audio_config(width, language["hidden_size"]),
            "position_id_per_seconds": 13,
        }
        settings |= {"initializer_range": language["initializer_range"]}
    return settings


def _audio_config(width: int, output_width: int) -> dict[str, Any]:
    return {
        "num_mel_bins": AUDIO_EXTRACTOR["feature_size"],
        "encoder_layers": 2,
        "encoder_attention_heads": width // HEAD_DIM,
        "encoder_ffn_dim": 2 * width,
        "d_model": width,
        "n_window": 50,
        "n_window_infer": 800,
        "output_dim": output_width,
        "downsample_hidden_size": 16,
        "initializer_range": 1 / math.sqrt(width),
    }


def _random_model(
    config: PreTrainedConfig, tokenizer: Qwen2Tokenizer, *, seed: int
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build_model(config)
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(
        eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _build_model(config: PreTrainedConfig) -> PreTrainedModel:
    if config.model_type not in MEDIA_FAMILIES:
        text_model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return text_model
    if _reads_audio(config.model_type):  # no auto class supports the thinker alone
        omni_model: PreTrainedModel = Qwen3OmniMoeThinkerForConditionalGeneration(config)
        return omni_model
    vision_model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32
    )
    return vision_model
