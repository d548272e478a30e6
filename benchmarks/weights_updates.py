"""Versions that come while an engine generates: what becomes of its tokens. Called by
`benchmarks.weights`."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import load_file

from benchmarks.clock import timed
from relax_events.config import EngineConfig, ModelConfig, SamplingConfig, SGLangConfig
from relax_events.engines.protocol import Engine, GenerationRequest, SampleRequest
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.examples.tiny_models import make_tiny
from relax_events.weights import Weights
from relax_events.weights.artifact_writer import weights_digest

SGLANG_PYTHON = Path(".venv-sglang/bin/python")
NUM_PROMPTS, SAMPLES_PER_PROMPT, PROMPT_TOKENS, NEW_TOKENS = 4, 4, 32, 256
TOKENS_BETWEEN = 400
POLL_SECONDS = 0.005
DESCRIPTION = f"""\
A tiny model, {NUM_PROMPTS} prompts of {PROMPT_TOKENS} tokens with {SAMPLES_PER_PROMPT} samples each, {NEW_TOKENS} tokens for a sample, on
each engine; a new version whenever {TOKENS_BETWEEN} more tokens have been generated, under samples that are computed again (`restart`) or keep their
cache (`swap`). *Generated* counts the tokens that the engine generated, *in samples* what the finished samples hold, *seconds* what loading a version takes."""


def engines(path: Path) -> Iterator[tuple[str, Engine]]:
    """Open each engine that is installed, one after the other."""
    bounds: dict[str, Any] = {
        "max_running_samples": NUM_PROMPTS * SAMPLES_PER_PROMPT,
        "max_context_tokens": 512,
    }
    model = ModelConfig(dtype="float32", path=path, device="cpu")
    with closing(
        TransformersEngine(path, config=EngineConfig(threads=1, **bounds), model=model)
    ) as engine:
        yield "transformers", engine
    if SGLANG_PYTHON.exists():
        config = EngineConfig(threads=1, **bounds, sglang=SGLangConfig(python=str(SGLANG_PYTHON)))
        with closing(SGLangEngine(path, config=config, model=model)) as engine:
            yield "sglang", engine


def requests() -> list[GenerationRequest]:
    """Ask for samples, all of which end by their length."""
    generator = np.random.default_rng(0)
    none = np.empty(0, np.int32)
    return [
        GenerationRequest(
            prompt_group_id=f"g{number}",
            prompt_tokens=generator.integers(0, 256, PROMPT_TOKENS).astype(np.int32),
            samples=tuple(
                SampleRequest(
                    sample_id=f"g{number}/{index}",
                    seed=index,
                    tokens=none,
                    logprobs=np.empty(0, np.float32),
                    segments=(),
                )
                for index in range(SAMPLES_PER_PROMPT)
            ),
            sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
            stop_token_ids=(),
        )
        for number in range(NUM_PROMPTS)
    ]


def measure_way(
    engine: Engine, weights: Sequence[Weights], on_running: Literal["restart", "swap"]
) -> dict[str, Any]:
    """Generate all samples while versions come; return the metrics."""
    num_before, num_in_samples, seconds, versions = (
        engine.usage.num_generated,
        0,
        list[float](),
        iter(weights),
    )
    for request in requests():
        engine.submit(request)
    while engine.num_running:
        num_in_samples += sum(
            len(sample.tokens) for sample in engine.poll(timeout_seconds=POLL_SECONDS)
        )
        if engine.num_running and engine.usage.num_generated - num_before >= TOKENS_BETWEEN * (
            len(seconds) + 1
        ):
            seconds.append(
                timed(partial(engine.load_weights, next(versions), on_running=on_running))
            )
    generated = engine.usage.num_generated - num_before
    return {
        "updates": len(seconds),
        "generated": generated,
        "in samples": num_in_samples,
        "lost": generated - num_in_samples,
        "seconds": statistics.median(seconds),
    }


def measure() -> list[dict[str, Any]]:
    """Measure both ways on every engine."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            make_tiny(Path(folder) / str(seed), corpus=["12=21"], seed=seed) for seed in range(2)
        ]
        states = [load_file(next(path.glob("*.safetensors"))) for path in paths]
        digests = [weights_digest(state) for state in states]
        for name, engine in engines(paths[0]):
            for on_running in ("restart", "swap"):
                first = engine.policy_version + 1
                weights = [
                    Weights(version, states[version % 2], digests[version % 2])
                    for version in range(first, first + 100)
                ]
                found.append(
                    {"engine": name, "running samples": on_running}
                    | measure_way(engine, weights, on_running)
                )
    return found
