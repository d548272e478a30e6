"""Train a small byte-level tokenizer in Qwen's format on a task's own text, without any
download.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from relax_events.models.chat_template import OWN_TEMPLATE

NUM_BYTES = 256
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
ROLE_PHRASES = ("system\n", "user\n", "assistant\n")


def train_tokenizer(
    corpus: Iterable[str], *, vocab_size: int = NUM_BYTES, phrases: Sequence[str] = ()
) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer with Qwen's special tokens and chat template.

    A corpus too small for `vocab_size` results in fewer merges. The same corpus always gives the
    same tokenizer.

    Args:
        corpus: Texts to learn merges from.
        vocab_size: Byte symbols and merges together, without special tokens and phrases; 256 means
            no merges, one token per byte.
        phrases: Texts that become one token each: the constant text around a task's problems.
    Raises:
        ValueError: `vocab_size` has no room for the 256 byte symbols.
    """
    if vocab_size < NUM_BYTES:
        raise ValueError(
            f"vocab_size must be >= {NUM_BYTES} (one symbol per byte), got {vocab_size}; "
            "raise vocab_size"
        )
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    trained = json.loads(raw.to_str())["model"]
    settings: dict[str, Any] = {
        "vocab": trained["vocab"],
        "merges": [tuple(merge) for merge in trained["merges"]],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    tokenizer = Qwen2Tokenizer(**settings)
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [
            AddedToken(phrase, normalized=False)
            for phrase in dict.fromkeys((*ROLE_PHRASES, *phrases))
        ]
    )
    tokenizer.padding_side = "left"
    tokenizer.chat_template = OWN_TEMPLATE
    return tokenizer


def constant_phrases(prompts: Sequence[str]) -> list[str]:
    """Find the common prefix and suffix of all prompts.

    Each becomes one token. The problem itself keeps one token per character, which a model of 0.1
    million parameters can attend to; learned merges would split its words irregularly. Fewer than
    two different prompts have no constant part.
    """
    if len(set(prompts)) < 2:
        return []
    prefix = _common_prefix(prompts)
    suffix = _common_prefix([prompt[len(prefix) :][::-1] for prompt in prompts])[::-1]
    return [phrase for phrase in (prefix, suffix) if len(phrase) > 1]


def _common_prefix(texts: Sequence[str]) -> str:
    # The common prefix of the smallest and the largest text is the common prefix of all.
    first, last = min(texts), max(texts)
    length = next(
        (
            index
            for index, (one, other) in enumerate(zip(first, last, strict=False))
            if one != other
        ),
        min(len(first), len(last)),
    )
    return first[:length]
