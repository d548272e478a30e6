"""A tiny model, an engine over it and requests for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from relax_events.config import EngineConfig, ModelConfig, SamplingConfig
from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest, SampleRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.engines.transformers.sampling import uniforms
from relax_events.errors import WeightsError
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.weights import Weights
from relax_events.weights.artifact_writer import weights_digest
from tests.folders import kept_folder

VOCAB_SIZE = 272
"""Byte symbols and the tokenizer's special tokens and phrases, at least."""
MakeEngine = Callable[..., Engine]


@cache
def tiny_model(family: str = "qwen3", seed: int = 3) -> Path:
    """Write a tiny random model once in a test process."""
    return make_tiny(
        kept_folder("engine"), corpus=["12=21"], family=family, hidden_size=32, seed=seed
    )


def make_engine(
    path: Path | None = None, *, model: Mapping[str, Any] | None = None, **settings: Any
) -> TransformersEngine:
    """Open an engine on one CPU thread."""
    path = path or tiny_model()
    config = EngineConfig(
        **{"threads": 1, "max_running_samples": 16, "max_context_tokens": 128} | settings
    )
    return TransformersEngine(
        path,
        config=config,
        model=ModelConfig(
            **{"dtype": "float32", "path": path, "device": "cpu"} | dict(model or {})
        ),
    )


def make_prompt(seed: int, num_tokens: int | None = None) -> NDArray[np.int32]:
    """Draw a prompt of 1 to 40 tokens."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, num_tokens or int(generator.integers(1, 41))).astype(np.int32)


def fresh_sample(sample_id: str, seed: int) -> SampleRequest:
    """Request a sample from its start."""
    return SampleRequest(
        sample_id=sample_id,
        seed=seed,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        segments=(),
    )


def make_request(
    number: int,
    *,
    num_samples: int = 2,
    prompt: NDArray[np.int32] | None = None,
    stops: tuple[int, ...] = (),
    num_top: int = 0,
    **sampling: Any,
) -> GenerationRequest:
    """Request a prompt group; its number determines all its contents."""
    return GenerationRequest(
        prompt_group_id=f"g{number}",
        prompt_tokens=make_prompt(number) if prompt is None else prompt,
        samples=tuple(
            fresh_sample(f"g{number}/{index}", 1000 * number + index)
            for index in range(num_samples)
        ),
        sampling=SamplingConfig(**{"max_new_tokens": 6} | sampling),
        stop_token_ids=stops,
        num_top_tokens=num_top,
    )


def continued(request: GenerationRequest, partial: list[GeneratedSample]) -> GenerationRequest:
    """Request the continuation of aborted samples."""
    seeds = {sample.sample_id: sample.seed for sample in request.samples}
    samples = tuple(
        SampleRequest(
            sample_id=one.sample_id,
            seed=seeds[one.sample_id],
            tokens=one.tokens,
            logprobs=one.logprobs,
            segments=one.segments,
            top_tokens=one.top_tokens,
            routed_experts=one.routed_experts,
        )
        for one in partial
    )
    return GenerationRequest(
        prompt_group_id=request.prompt_group_id,
        prompt_tokens=request.prompt_tokens,
        samples=samples,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        num_top_tokens=request.num_top_tokens,
    )


def generated(**reported: Any) -> GeneratedSample:
    """Make up a sample of two tokens as an engine hands it out, with the other fields given."""
    return GeneratedSample(
        sample_id="000000-0000-0/0",
        prompt_group_id="000000-0000-0",
        tokens=np.array([5, 6], np.int32),
        logprobs=np.zeros(2, np.float32),
        segments=(VersionSegment(0, 2),),
        finish_reason=FinishReason.STOP,
        **reported,
    )


def finish(engine: Engine) -> dict[str, GeneratedSample]:
    """Poll until nothing runs."""
    samples: dict[str, GeneratedSample] = {}
    while True:
        finished = engine.poll(timeout_seconds=60.0)
        samples |= {sample.sample_id: sample for sample in finished}
        if not finished and engine.num_running == 0:
            return samples


def step(engine: Engine, times: int = 1) -> None:
    """Take decoding steps, none of which may finish a sample; the first prefills and decodes two
    tokens."""
    for _ in range(times):
        assert engine.poll(timeout_seconds=0.0) == []


def bits(sample: GeneratedSample) -> tuple[bytes, bytes]:
    """Return what is equal to the last bit where one computation is repeated: the same requests, in
    the same order, at the same steps."""
    return sample.tokens.tobytes(), sample.logprobs.tobytes()


@cache
def plain_model(path: Path) -> torch.nn.Module:
    """Load a model without any code of the engine's; callers must not change it."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    return model.eval()


def plain_logprobs(
    prompt: NDArray[np.int32],
    completion: NDArray[np.int32],
    *,
    path: Path | None = None,
    temperature: float = 1.0,
) -> NDArray[Any]:
    """Compute a completion's log-probabilities from one whole forward in float64."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.no_grad():
        logits: Tensor = plain_model(path or tiny_model())(ids).logits[0] / temperature
    picked = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    result: NDArray[Any] = picked[len(prompt) - 1 :].numpy()
    return result


def check_draws(
    samples: Mapping[str, GeneratedSample],
    *requests: GenerationRequest,
    path: Path | None = None,
    logprob_error: float = 1e-4,
    draw_error: float = 1e-4,
) -> None:
    """Compare samples with whole forwards in float64: their log-probabilities, and that their own
    seeds sampled their tokens.

    That is what an engine promises whatever else runs and wherever a sample began. Two computations
    round differently, so bits are compared only where one computation is repeated.

    Args:
        samples: By id; those that the requests name are looked at.
        requests: That were asked for, without top-k and top-p.
        path: The model's folder; the tiny one without it.
        logprob_error: Largest difference of a log-probability, in nats.
        draw_error: How far a random number may lie outside of its token's part of the distribution.
    """
    for request in requests:
        assert (request.sampling.top_k, request.sampling.top_p) == (0, 1.0)
        for asked in request.samples:
            sample = samples[asked.sample_id]
            ids = torch.from_numpy(
                np.concatenate([request.prompt_tokens, sample.tokens]).astype(np.int64)
            )[None]
            with torch.no_grad():
                logits = plain_model(path or tiny_model())(ids).logits[
                    0, len(request.prompt_tokens) - 1 : -1
                ]
            logprobs: NDArray[Any] = (logits / request.sampling.temperature).log_softmax(-1).numpy()
            positions = np.arange(len(sample.tokens))
            np.testing.assert_allclose(
                sample.logprobs, logprobs[positions, sample.tokens], rtol=0, atol=logprob_error
            )
            numbers = uniforms(np.full(len(positions), asked.seed, np.uint64), positions)
            ends = np.exp(logprobs).cumsum(-1)[positions, sample.tokens]
            starts = ends - np.exp(logprobs[positions, sample.tokens])
            assert (numbers >= starts - draw_error).all(), sample.sample_id
            assert (numbers <= ends + draw_error).all(), sample.sample_id


def other_weights(
    policy_version: int, *, seed: int = 4, family: str = "qwen3"
) -> tuple[Weights, Path]:
    """Return the weights of another tiny model of the same shape, and its folder."""
    path = tiny_model(family, seed=seed)
    tensors = {
        name: parameter.detach().clone()
        for name, parameter in AutoModelForCausalLM.from_pretrained(path).named_parameters()
    }
    return Weights(policy_version, tensors, weights_digest(tensors)), path


def check_misfits_are_refused(engine: Engine) -> None:
    """Load weights that lack a tensor, have one too many, or one of another shape: each is refused
    by name."""
    weights, _ = other_weights(1)
    name = "model.norm.weight"
    torn = {
        "lack model.norm.weight": {
            other: tensor for other, tensor in weights.tensors.items() if other != name
        },
        "no tensor model.other.weight": weights.tensors | {"model.other.weight": torch.zeros(1)},
        r"model.norm.weight must be \(32,\) as in the model, got \(31,\)": weights.tensors
        | {name: torch.zeros(31)},
    }
    for text, tensors in torn.items():
        with pytest.raises(WeightsError, match=text):
            engine.load_weights(Weights(1, tensors, bytes(32)))
