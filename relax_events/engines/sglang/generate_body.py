"""The body of a generate request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_events.config import SamplingConfig

SEEDS = 2**63
"""A server takes seeds below this."""


def build_generate_body(
    prompts: Sequence[dict[str, Any]],
    *,
    media: Sequence[str],
    sampling: SamplingConfig,
    extra_key: str,
    num_top: int,
) -> dict[str, Any]:
    """Return the body of a generate request; see `SGLangClient.generate`."""
    common = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "skip_special_tokens": False,
    }
    return {
        "input_ids": [prompt["input_ids"] for prompt in prompts],
        "rid": [prompt["rid"] for prompt in prompts],
        "sampling_params": [
            common
            | {
                "max_new_tokens": prompt["max_new_tokens"],
                "stop_token_ids": prompt["stop_token_ids"],
            }
            for prompt in prompts
        ],
        "extra_key": [extra_key] * len(prompts),
        "return_logprob": True,
        "top_logprobs_num": num_top,
        "stream": True,
        **({"image_data": [[one] for one in media]} if media else {}),
    }


def add_seeds(body: dict[str, Any], seeds: Sequence[int]) -> None:
    """Give each sample of a request its own seed; a server draws a token by seed and position, so a
    sample that continues elsewhere continues the same draws.
    """
    for parameters, seed in zip(body["sampling_params"], seeds, strict=True):
        parameters["sampling_seed"] = seed % SEEDS
