"""The engine's report of the experts that computed its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_requests import (
    continued,
    finish,
    generated,
    make_engine,
    make_request,
    other_weights,
    plain_logprobs,
    plain_model,
    step,
    tiny_model,
)
from routed_samples import check_experts, chosen_by, routed_logprobs

from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import ConfigError, PoisonSample
from relax_events.roles.inflight_group import select_routed_experts

FAMILY = "qwen3_moe"


def recording_engine() -> TransformersEngine:
    return make_engine(tiny_model(FAMILY), model={"routing_replay": "rollout"})


def sequence_of(request: GenerationRequest, sample: GeneratedSample) -> np.ndarray:
    return np.concatenate([request.prompt_tokens, sample.tokens])


def test_experts_are_reported_for_every_token_but_the_last() -> None:
    engine = recording_engine()
    requests = [make_request(number, num_samples=3, max_new_tokens=12) for number in range(4)]
    for request in requests:
        engine.submit(request)
    samples = finish(engine)
    for request in requests:
        for one in request.samples:
            sample = samples[one.sample_id]
            tokens = sequence_of(request, sample)
            assert sample.routed_experts is not None
            assert (sample.routed_experts.shape, sample.routed_experts.dtype) == (
                (len(tokens) - 1, 2, 2),
                np.uint8,
            )
            check_experts(sample.routed_experts, tiny_model(FAMILY), tokens)


def test_engine_reports_no_experts_unless_requested() -> None:
    engine = make_engine(tiny_model(FAMILY))
    engine.submit(make_request(1))
    assert {sample.routed_experts for sample in finish(engine).values()} == {None}


def test_recording_experts_does_not_change_samples() -> None:
    request, sampled = make_request(3, num_samples=4, max_new_tokens=20), []
    for engine in (make_engine(tiny_model(FAMILY)), recording_engine()):
        engine.submit(request)
        sampled.append(
            {
                name: (sample.tokens.tobytes(), sample.logprobs.tobytes())
                for name, sample in finish(engine).items()
            }
        )
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize("how", ["restart", "swap", "abort"])
def test_each_segment_records_the_routing_of_the_weights_that_sampled_it(how: str) -> None:
    engine, request = recording_engine(), make_request(2, max_new_tokens=24)
    weights, path = other_weights(1, family=FAMILY)
    engine.submit(request)
    step(engine, 8)
    if how == "abort":
        partial = engine.abort()
        engine.load_weights(weights)
        engine.submit(continued(request, partial))
    else:
        engine.load_weights(weights, on_running="swap" if how == "swap" else "restart")
    for sample in finish(engine).values():
        tokens, (first, second) = sequence_of(request, sample), sample.segments
        split = (
            len(request.prompt_tokens) + first.num_tokens - 1
        )  # of the token that the new weights read to sample their first one
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(tokens) - 1
        assert (first.policy_version, second.policy_version) == (0, 1)
        check_experts(sample.routed_experts[:split], tiny_model(FAMILY), tokens)
        assert (sample.routed_experts[:split] != chosen_by(path, tokens)[:split]).any()
        if how != "swap":  # a kept cache is a mixture of both versions, which no whole forward has
            check_experts(sample.routed_experts[split:], path, tokens, begin=split)


def test_next_engine_completes_partially_reported_experts() -> None:
    engine, request = recording_engine(), make_request(2, num_samples=1, max_new_tokens=24)
    engine.submit(request)
    step(engine, 8)
    (partial,) = engine.abort()
    assert partial.routed_experts is not None
    reported = partial.routed_experts[:5]
    engine.submit(continued(request, [replace(partial, routed_experts=reported)]))
    (sample,) = finish(engine).values()
    tokens = sequence_of(request, sample)
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == len(tokens) - 1
    check_experts(sample.routed_experts, tiny_model(FAMILY), tokens)


def test_prefix_with_routed_experts_of_wrong_shape_is_rejected() -> None:
    engine, request = recording_engine(), make_request(2, num_samples=1)
    num_read = len(request.prompt_tokens) - 1
    for shape in ((2, 3, 2), (num_read + 1, 2, 2)):
        odd = replace(
            request,
            samples=(replace(request.samples[0], routed_experts=np.zeros(shape, np.uint8)),),
        )
        with pytest.raises(
            PoisonSample,
            match=rf"sample g2/0: the prefix's routed_experts must be of at most {num_read} tokens, 2 layers and 2 ex",
        ):
            engine.submit(odd)


def test_routing_replay_rejects_a_model_without_experts() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model.routing_replay needs a mixture of experts, but the model in .* is not one",
    ):
        make_engine(model={"routing_replay": "rollout"})


def test_experts_are_recorded_only_when_routing_replay_is_enabled(make_run_config: Any) -> None:
    asking, experts = (
        make_run_config(model={"routing_replay": "rollout"}),
        np.zeros((4, 2, 2), np.uint8),
    )
    assert select_routed_experts(generated(routed_experts=experts), asking, num_tokens=5) is experts
    assert (
        select_routed_experts(generated(routed_experts=experts), make_run_config(), num_tokens=5)
        is None
    )


@pytest.mark.parametrize(
    ("experts", "got"), [(None, "none"), (np.zeros((3, 2, 2), np.uint8), "the experts of 3")]
)
def test_engine_that_does_not_report_experts_is_rejected_with_a_remedy(
    experts: np.ndarray | None, got: str, make_run_config: Any
) -> None:
    need = rf"needs the routed experts of 4 tokens of sample 000000-0000-0/0; .* gave {got}; take another engine, or routing_replay = 'none'"
    with pytest.raises(ConfigError, match=need):
        select_routed_experts(
            generated(routed_experts=experts),
            make_run_config(model={"routing_replay": "rollout"}),
            num_tokens=5,
        )


def test_hand_written_routed_forward_matches_the_model() -> None:
    tokens = np.arange(3, 40, dtype=np.int32)
    by_hand = routed_logprobs(plain_model(tiny_model(FAMILY)), tokens)
    np.testing.assert_allclose(
        by_hand, plain_logprobs(tokens[:1], tokens[1:], path=tiny_model(FAMILY)), atol=1e-5
    )


def test_experts_that_a_router_did_not_choose_are_noticed() -> None:
    tokens, path = np.arange(3, 40, dtype=np.int32), tiny_model(FAMILY)
    experts = chosen_by(path, tokens)
    check_experts(experts, path, tokens)
    experts[30, 1, 0] = (experts[30, 1, 0] + 1) % 8
    with pytest.raises(AssertionError, match=r"layer 1 chooses otherwise for tokens \[30\]"):
        check_experts(experts, path, tokens)
    check_experts(experts[31:], path, tokens, begin=31)
