"""Tiny models of real architectures with random weights: the whole pipeline runs on two CPU cores with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel, Qwen2Tokenizer

from relax_events.errors import ConfigError
from relax_events.models.tokenizer import NUM_BYTES, train_tokenizer

HEAD_DIM = 16
MAX_CONTEXT_TOKENS = 4096
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1},
}


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
    """Write a tiny random model and its own tokenizer in Hugging Face layout, and return the folder.

    The same arguments give the same files, byte for byte. Existing files of a model in `path` are replaced.

    Args:
        path: The folder; made if missing.
        corpus: Texts that the tokenizer is trained on.
        family: `qwen3` or `qwen3_moe`.
        hidden_size: Width of the model, a multiple of 32.
        num_layers: Decoder layers.
        vocab_size: Byte symbols and merges of the tokenizer; special tokens and phrases come on top.
        phrases: Texts that become one token each.
        seed: Of the random weights.
    Raises:
        ConfigError: The family is not known, or a size does not fit.
    """
    if family not in FAMILY_SETTINGS:
        raise ConfigError(f"model family {family!r} is not known; choose one of {', '.join(FAMILY_SETTINGS)}")
    if hidden_size < 2 * HEAD_DIM or hidden_size % (2 * HEAD_DIM):
        raise ConfigError(f"hidden_size must be a multiple of {2 * HEAD_DIM}, got {hidden_size}; set it to 32, 64, 96, ...")
    if vocab_size < NUM_BYTES:
        raise ConfigError(f"vocab_size must be >= {NUM_BYTES} (one symbol per byte), got {vocab_size}; raise vocab_size")
    tokenizer = train_tokenizer(corpus, vocab_size=vocab_size, phrases=phrases)
    model = _random_model(_config(tokenizer, family=family, hidden_size=hidden_size, num_layers=num_layers), seed=seed)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _config(tokenizer: Qwen2Tokenizer, *, family: str, hidden_size: int, num_layers: int) -> PreTrainedConfig:
    num_heads = hidden_size // HEAD_DIM
    config: PreTrainedConfig = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        # The usual 0.02 is for widths of thousands; at width 64 it starves the signal and learning takes several times as long.
        initializer_range=1 / math.sqrt(hidden_size),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **FAMILY_SETTINGS[family],
    )
    return config


def _random_model(config: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stops = [config.eos_token_id, config.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=config.pad_token_id)
    return model
