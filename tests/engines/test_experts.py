"""A mixture of experts on an SGLang server, which reports the experts of each token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_gate import Gate
from engine_requests import (
    continued,
    finish,
    make_prompt,
    make_request,
    other_weights,
    plain_model,
    tiny_model,
)
from routed_samples import check_experts, chosen_by, routed_logprobs

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.events.parts import VersionSegment
from relax_events.weights import Weights

pytestmark = pytest.mark.timeout(720)  # the first test waits for the server
FAMILY, LONG = "qwen3_moe", 300
MORE = 64
"""Tokens at which samples that have been taken out once are held: more than they had then."""


@pytest.fixture(scope="module")
def engine(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """Open an engine with an SGLang server of its own, which ends with it and leaves nothing
    behind."""
    path, directory = tiny_model(FAMILY), tmp_path_factory.mktemp("weights")
    sglang = SGLangConfig(
        weights_directory=directory, stream_interval_tokens=4, python=sglang_python
    )
    config = EngineConfig(threads=1, max_running_samples=8, max_context_tokens=512, sglang=sglang)
    model = ModelConfig(dtype="float32", path=path, routing_replay="rollout")
    with closing(SGLangEngine(path, config=config, model=model)) as opened:
        yield opened
    assert list(directory.iterdir()) == []


def sequence_of(request: GenerationRequest, sample: GeneratedSample) -> np.ndarray:
    return np.concatenate([request.prompt_tokens, sample.tokens])


def check_whole(request: GenerationRequest, sample: GeneratedSample, path: Path) -> None:
    """Compare log-probabilities and experts of a sample of one version with the computation by
    hand."""
    tokens = sequence_of(request, sample)
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint8
    assert len(sample.routed_experts) == len(tokens) - 1
    check_experts(sample.routed_experts, path, tokens)
    expected = routed_logprobs(plain_model(path), tokens, sample.routed_experts)
    np.testing.assert_allclose(
        sample.logprobs, expected[len(request.prompt_tokens) - 1 :], atol=1e-5
    )


def begin(engine: SGLangEngine, request: GenerationRequest, gate: Gate) -> list[GeneratedSample]:
    """Let samples begin, and take them out again with some tokens."""
    gate.shut(12)
    before = engine.num_tokens
    engine.submit(request)
    while engine.num_tokens < before + 10 * len(request.samples):
        assert engine.poll(timeout_seconds=0.1) == []
    partial = engine.abort()
    gate.open()
    return partial


def test_routed_experts_equal_those_of_transformers_in_all_layers(
    engine: SGLangEngine,
) -> None:
    request = make_request(1, prompt=make_prompt(1, 40), max_new_tokens=60)
    engine.submit(request)
    for sample in finish(engine).values():
        check_whole(request, sample, tiny_model(FAMILY))
    engine.submit(request)  # whose prompt the server has in its cache now
    for sample in finish(engine).values():
        check_whole(request, sample, tiny_model(FAMILY))


@pytest.mark.parametrize("num_reported", [None, 0, 5])
def test_continued_sample_reports_the_routing_of_all_its_tokens(
    engine: SGLangEngine, gate: Gate, num_reported: int | None
) -> None:
    request = make_request(2, max_new_tokens=LONG, temperature=1.3)
    partial = begin(engine, request, gate)
    for sample in partial:
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(sequence_of(request, sample)) - 1
    reported = [
        replace(
            one,
            routed_experts=None
            if one.routed_experts is None
            else one.routed_experts[:num_reported],
        )
        for one in partial
    ]
    engine.submit(continued(request, reported))
    for sample in finish(engine).values():
        tokens = sequence_of(request, sample)
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(tokens) - 1
        check_experts(sample.routed_experts, tiny_model(FAMILY), tokens)


def test_each_segment_records_the_routing_of_the_weights_that_sampled_it(
    engine: SGLangEngine, gate: Gate
) -> None:
    request, (weights, path) = make_request(3, max_new_tokens=LONG), other_weights(1, family=FAMILY)
    partial = begin(engine, request, gate)
    gate.shut(MORE)
    engine.submit(continued(request, partial))
    while engine.usage.num_decoding < len(request.samples):
        assert engine.poll(timeout_seconds=0.05) == []
    engine.load_weights(weights, on_running="restart")
    gate.open()
    for sample in finish(engine).values():
        tokens, (first, second) = sequence_of(request, sample), sample.segments
        assert (first.policy_version, second.policy_version) == (0, 1)
        split = len(request.prompt_tokens) + first.num_tokens - 1
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(tokens) - 1
        check_experts(sample.routed_experts[:split], tiny_model(FAMILY), tokens)
        check_experts(sample.routed_experts[split:], path, tokens, begin=split)
        assert (sample.routed_experts[:split] != chosen_by(path, tokens)[:split]).any()
    engine.submit(request)
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(1, LONG),)
        check_whole(request, sample, path)


MAX_SWAPS = 4
"""Where one of the model's own end tokens has just ended every request, a swap finds no cache."""


def swap_while_running(
    engine: SGLangEngine, gate: Gate, request: GenerationRequest, weights: Weights
) -> list[GeneratedSample]:
    """Load weights while samples run on their cache; return the finished samples."""
    partial, num_sampled = begin(engine, request, gate), engine.num_tokens
    gate.shut(MORE)
    engine.submit(continued(request, partial))
    while engine.num_tokens < num_sampled + 16:
        assert engine.poll(timeout_seconds=0.05) == []
    engine.load_weights(weights, on_running="swap")
    gate.open()
    return list(finish(engine).values())


def test_kept_kv_cache_keeps_its_original_routing(engine: SGLangEngine, gate: Gate) -> None:
    request = make_request(4, max_new_tokens=440)
    path = {0: tiny_model(FAMILY), 1: tiny_model(FAMILY, seed=4)}[engine.policy_version]
    for version in range(2, 2 + MAX_SWAPS):
        before, old = engine.policy_version, path
        weights, path = other_weights(version, seed=3 + version, family=FAMILY)
        samples = swap_while_running(engine, gate, request, weights)
        if any(segment.kept_cache for sample in samples for segment in sample.segments):
            break
    else:
        pytest.fail(f"none of {MAX_SWAPS} swaps kept a cache")
    for sample in samples:
        first, *later = (
            sample.segments
        )  # several, where one of the model's own end tokens has ended a request
        assert (first.policy_version, {segment.policy_version for segment in later}) == (
            before,
            {version},
        )
        tokens, split = (
            sequence_of(request, sample),
            len(request.prompt_tokens) + first.num_tokens - 1,
        )
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(tokens) - 1
        check_experts(sample.routed_experts[:split], old, tokens)
