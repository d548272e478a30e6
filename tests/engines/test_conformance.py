"""One conformance suite for all engines: sampled tokens may differ, reported metadata may not."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_gate import Gate
from engine_requests import (
    MakeEngine,
    check_misfits_are_refused,
    continued,
    finish,
    fresh_sample,
    make_prompt,
    make_request,
    other_weights,
    plain_logprobs,
    plain_model,
    tiny_model,
)
from routed_engines import Fragile

from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest, SampleRequest
from relax_events.engines.replicas.router import Router
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.server import SGLangServer
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.weights import Weights

pytestmark = pytest.mark.timeout(720)  # the first test waits for the server
LONG = 400
"""Tokens of a sample that the gate holds."""


def begin(engine: Engine, request: GenerationRequest, gate: Gate) -> None:
    """Let an engine generate until a few tokens of each sample are there, and hold it there; SGLang
    continues, slowly."""
    gate.shut()
    engine.submit(request)
    while True:
        assert engine.poll(timeout_seconds=0.05) == []
        counts = token_counts(engine)
        if len(counts) == len(request.samples) and min(counts) > 2:
            return


def token_counts(engine: Engine) -> list[int]:
    """Return how many tokens the samples of an engine have that are under way."""
    if isinstance(engine, Router):
        return [
            count
            for member in engine._replicas
            if member._engine is not None
            for count in token_counts(member._engine)
        ]
    if isinstance(engine, Fragile):
        return token_counts(engine._engine)
    if isinstance(engine, SGLangServer):
        return [
            len(request.tokens) for request in list(engine._lifecycle.generation._requests.values())
        ]
    assert isinstance(engine, TransformersEngine)
    counts: list[int] = engine._table._counts[: engine._table.num_rows].tolist()
    return counts


def runs(sample: GeneratedSample) -> list[tuple[VersionSegment, slice]]:
    """Return the segments of a sample, each with the slice of its tokens."""
    ends = np.cumsum([segment.num_tokens for segment in sample.segments]).tolist()
    assert ends[-1] == len(sample.tokens) == len(sample.logprobs)
    return [
        (segment, slice(end - segment.num_tokens, end))
        for segment, end in zip(sample.segments, ends, strict=True)
    ]


def test_logprobs_agree_with_one_whole_forward(make: MakeEngine) -> None:
    engine = make()
    requests = [make_request(number, max_new_tokens=20) for number in range(6)]
    for request in requests:
        engine.submit(request)
    samples = finish(engine)
    assert len(samples) == 12
    for request in requests:
        for sample in request.samples:
            generated = samples[sample.sample_id]
            assert (len(generated.tokens), generated.finish_reason, generated.error) == (
                20,
                FinishReason.LENGTH,
                "",
            )
            assert (
                generated.tokens.dtype,
                generated.logprobs.dtype,
                generated.prompt_group_id,
            ) == (np.int32, np.float32, request.prompt_group_id)
            np.testing.assert_allclose(
                generated.logprobs,
                plain_logprobs(request.prompt_tokens, generated.tokens),
                atol=1e-5,
            )


def test_logprobs_are_tempered_and_not_renormalised(make: MakeEngine) -> None:
    engine = make()
    request = make_request(1, temperature=0.7, top_k=5, top_p=0.8)
    engine.submit(request)
    for sample in finish(engine).values():
        np.testing.assert_allclose(
            sample.logprobs,
            plain_logprobs(request.prompt_tokens, sample.tokens, temperature=0.7),
            atol=1e-5,
        )


def test_sampled_tokens_follow_the_probabilities(make: MakeEngine) -> None:
    engine = make()
    request = make_request(1, num_samples=400, max_new_tokens=1, temperature=0.5)
    engine.submit(request)
    sampled = np.bincount(
        [int(sample.tokens[0]) for sample in finish(engine).values()], minlength=300
    )
    likeliest = np.argsort(sampled)[-3:]
    expected = [
        400
        * np.exp(
            plain_logprobs(request.prompt_tokens, np.array([token], np.int32), temperature=0.5)[0]
        )
        for token in likeliest
    ]
    assert np.abs(sampled[likeliest] - expected).max() < 5 * np.sqrt(max(expected))


def test_sample_ends_after_its_stop_token_and_keeps_it(make: MakeEngine) -> None:
    engine = make()
    engine.submit(make_request(1, num_samples=1, max_new_tokens=12, top_k=1))
    (whole,) = finish(engine).values()
    stop = int(whole.tokens[5])
    engine.submit(make_request(1, num_samples=1, max_new_tokens=12, top_k=1, stops=(300, stop)))
    (sample,) = finish(engine).values()
    end = whole.tokens.tolist().index(stop) + 1
    assert sample.finish_reason is FinishReason.STOP
    assert sample.tokens.tolist() == whole.tokens[:end].tolist()
    assert whole.finish_reason is FinishReason.LENGTH


def test_only_stop_tokens_of_the_request_end_a_sample(make: MakeEngine) -> None:
    engine = make()
    request = make_request(1, num_samples=8, max_new_tokens=LONG, temperature=3.0)
    engine.submit(request)
    samples = finish(engine)
    assert {len(sample.tokens) for sample in samples.values()} == {LONG}
    assert any(
        {256, 257} & set(sample.tokens.tolist()) for sample in samples.values()
    )  # the tokenizer's own ends are among them


def test_sample_ends_where_the_context_is_full(make: MakeEngine) -> None:
    engine = make(max_context_tokens=20)
    engine.submit(make_request(1, prompt=make_prompt(1, 19), max_new_tokens=100))
    engine.submit(make_request(2, prompt=make_prompt(2, 4), max_new_tokens=100))
    samples = finish(engine)
    assert [len(samples[name].tokens) for name in ("g1/0", "g2/1")] == [1, 16]
    assert {sample.finish_reason for sample in samples.values()} == {FinishReason.LENGTH}


def test_samples_beyond_the_concurrency_limit_are_queued(make: MakeEngine) -> None:
    engine = make()
    for number in range(10):
        engine.submit(make_request(number, num_samples=5))
    assert engine.num_running == 50
    samples = finish(engine)
    assert (len(samples), engine.num_running) == (50, 0)
    assert engine.num_tokens == sum(len(sample.tokens) for sample in samples.values())


def test_usage_counts_sampled_tokens_and_prompt_tokens(make: MakeEngine) -> None:
    engine = make()
    before = engine.usage
    requests = [make_request(number, num_samples=4, max_new_tokens=5) for number in range(3)]
    for request in requests:
        engine.submit(request)
    finish(engine)
    usage = engine.usage
    assert (usage.num_decoding, usage.num_waiting) == (0, 0)
    assert usage.num_generated - before.num_generated == 3 * 4 * 5
    num_prefilled, num_reused = (
        usage.num_prefilled - before.num_prefilled,
        usage.num_cached - before.num_cached,
    )
    num_resumed = usage.num_recomputed - before.num_recomputed
    assert_at_least(
        engine,
        [num_prefilled + num_reused, num_resumed],
        [sum(4 * len(request.prompt_tokens) for request in requests), 0],
    )
    assert num_prefilled >= sum(len(request.prompt_tokens) for request in requests)


def test_usage_counts_recomputed_tokens_of_continued_samples(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    request = make_request(1, max_new_tokens=LONG)
    begin(engine, request, gate)
    assert engine.usage.num_decoding == len(request.samples)
    partial = engine.abort()
    before = engine.usage
    gate.open()
    engine.submit(continued(request, partial))
    finish(engine)
    assert_at_least(
        engine,
        [engine.usage.num_recomputed - before.num_recomputed],
        [sum(len(sample.tokens) for sample in partial)],
    )


def assert_at_least(engine: Engine, counts: list[int], expected: list[int]) -> None:
    """Compare counts with those expected; a server's may be above: a sample that one of its own end
    tokens has ended is sent again."""
    if isinstance(engine, SGLangEngine):
        assert all(count >= least for count, least in zip(counts, expected, strict=True))
    else:
        assert counts == expected


def test_poll_of_an_idle_engine_returns_an_empty_list_immediately(make: MakeEngine) -> None:
    assert make().poll(timeout_seconds=3600.0) == []


def test_segments_carry_the_version_of_every_token(make: MakeEngine) -> None:
    engine = make()
    engine.submit(make_request(1))
    assert all(sample.segments == (VersionSegment(0, 6),) for sample in finish(engine).values())
    weights, path = other_weights(7)
    engine.load_weights(weights)
    request = make_request(1)
    engine.submit(request)
    assert engine.policy_version == 7
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(7, 6),)
        np.testing.assert_allclose(
            sample.logprobs,
            plain_logprobs(request.prompt_tokens, sample.tokens, path=path),
            atol=1e-5,
        )


def test_restart_recomputes_running_samples_with_the_new_weights(
    make: MakeEngine, gate: Gate
) -> None:
    engine = make()
    request = make_request(1, max_new_tokens=LONG)
    weights, path = other_weights(1)
    begin(engine, request, gate)
    engine.load_weights(weights, on_running="restart")
    gate.open()
    samples = finish(engine)
    assert len(samples) == 2
    for sample in samples.values():
        (before, first), (after, second) = runs(sample)
        assert [(segment.policy_version, segment.kept_cache) for segment in (before, after)] == [
            (0, False),
            (1, False),
        ]
        old = plain_logprobs(request.prompt_tokens, sample.tokens)
        new = plain_logprobs(request.prompt_tokens, sample.tokens, path=path)
        np.testing.assert_allclose(sample.logprobs[first], old[first], atol=1e-5)
        np.testing.assert_allclose(sample.logprobs[second], new[second], atol=1e-5)


def test_swap_keeps_the_kv_cache_and_marks_the_segments(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    request = make_request(1, max_new_tokens=LONG, num_samples=4)
    weights, path = other_weights(1)
    begin(engine, request, gate)
    engine.load_weights(weights, on_running="swap")
    gate.open()
    kept = []
    for sample in finish(engine).values():
        old = plain_logprobs(request.prompt_tokens, sample.tokens)
        new = plain_logprobs(request.prompt_tokens, sample.tokens, path=path)
        for segment, span in runs(sample):
            differences = np.abs(sample.logprobs - (new if segment.policy_version else old))[span]
            assert segment.policy_version == 1 or not segment.kept_cache
            if segment.kept_cache:
                kept.append(differences.max())
            # of the old weights, or computed again after an end token of the model's that is none
            # of the request's
            else:
                assert differences.max() < 1e-5
    assert max(kept) > 1e-3
    engine.submit(request)  # whose prompt the server has in its cache, under the old weights
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(1, LONG),)
        np.testing.assert_allclose(
            sample.logprobs,
            plain_logprobs(request.prompt_tokens, sample.tokens, path=path),
            atol=1e-5,
        )


def test_engine_serves_the_old_weights_after_rejecting_new_ones(make: MakeEngine) -> None:
    engine = make()
    check_misfits_are_refused(engine)
    assert engine.policy_version == 0
    request = make_request(1)
    engine.submit(request)
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(0, 6),)
        np.testing.assert_allclose(
            sample.logprobs, plain_logprobs(request.prompt_tokens, sample.tokens), atol=1e-5
        )


def test_weights_that_are_not_finite_end_samples_with_an_error(
    make: MakeEngine, gate: Gate
) -> None:
    engine = make()
    weights, _ = other_weights(2)
    begin(engine, make_request(1, max_new_tokens=LONG), gate)
    broken = Weights(
        1,
        weights.tensors
        | {"model.layers.0.self_attn.v_proj.weight": torch.full((16, 32), torch.nan)},
        bytes(32),
    )
    engine.load_weights(broken)
    gate.open()
    engine.submit(make_request(2))
    samples = finish(engine)
    assert len(samples) == 4
    assert {sample.finish_reason for sample in samples.values()} == {FinishReason.ERROR}
    assert all("policy version 1" in sample.error for sample in samples.values())
    engine.load_weights(weights)
    engine.submit(make_request(3))
    assert {sample.finish_reason for sample in finish(engine).values()} == {FinishReason.LENGTH}


def test_aborted_samples_continue_from_their_last_token(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    request = make_request(1, num_samples=3, max_new_tokens=LONG)
    begin(engine, request, gate)
    partial = engine.abort()
    assert engine.num_running == 0
    assert {sample.finish_reason for sample in partial} == {FinishReason.ABORT}
    assert all(
        3 <= len(sample.tokens) < LONG and len(sample.logprobs) == len(sample.tokens)
        for sample in partial
    )
    begun = {sample.sample_id: sample.tokens.tolist() for sample in partial}
    gate.open()
    engine.submit(continued(request, partial))
    for name, sample in finish(engine).items():
        assert sample.tokens[: len(begun[name])].tolist() == begun[name]
        assert sample.segments == (VersionSegment(0, LONG),)
        np.testing.assert_allclose(
            sample.logprobs, plain_logprobs(request.prompt_tokens, sample.tokens), atol=1e-5
        )


def test_abort_removes_only_the_named_samples(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    begin(engine, make_request(1, num_samples=3, max_new_tokens=LONG), gate)
    aborted = engine.abort(["g1/1", "unknown"])
    assert [one.sample_id for one in aborted] == ["g1/1"]
    gate.open()
    assert finish(engine).keys() == {"g1/0", "g1/2"}


def test_engine_returns_the_top_tokens_with_the_sampled_tokens(make: MakeEngine) -> None:
    engine = make()
    request = make_request(2, num_top=3, temperature=0.7, top_k=2, max_new_tokens=20)
    engine.submit(request)
    for sample in finish(engine).values():
        ids = torch.from_numpy(
            np.concatenate([request.prompt_tokens, sample.tokens]).astype(np.int64)
        )[None]
        with torch.no_grad():
            logits = plain_model(tiny_model())(ids).logits[0][len(request.prompt_tokens) - 1 : -1]
        assert sample.top_tokens is not None
        assert sample.top_tokens.dtype == np.int32
        assert sample.top_tokens.tolist() == np.argsort(-logits.numpy(), axis=-1)[:, :3].tolist()


def test_continued_sample_at_its_token_limit_is_returned_unchanged(make: MakeEngine) -> None:
    engine = make()
    request = make_request(1, num_samples=1)
    engine.submit(request)
    (whole,) = finish(engine).values()
    engine.submit(continued(request, [whole]))
    (again,) = finish(engine).values()
    assert (again.tokens.tolist(), again.finish_reason) == (
        whole.tokens.tolist(),
        FinishReason.LENGTH,
    )


def test_sleeping_engine_suspends_running_samples_until_it_wakes(
    make: MakeEngine, gate: Gate
) -> None:
    engine = make()
    request = make_request(1, max_new_tokens=LONG)
    begin(engine, request, gate)
    engine.sleep()
    assert engine.poll(timeout_seconds=3600.0) == []
    assert engine.num_running == 2
    engine.wake()
    gate.open()
    samples = finish(engine)
    assert {sample.segments for sample in samples.values()} == {(VersionSegment(0, LONG),)}
    for sample in samples.values():
        np.testing.assert_allclose(
            sample.logprobs, plain_logprobs(request.prompt_tokens, sample.tokens), atol=1e-5
        )


def test_load_weights_wakes_the_engine(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    begin(engine, make_request(1, max_new_tokens=LONG), gate)
    engine.sleep()
    engine.load_weights(other_weights(1)[0])
    gate.open()
    assert all(sample.segments[-1].policy_version == 1 for sample in finish(engine).values())


def test_poll_returns_when_it_is_interrupted(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    begin(engine, make_request(1, max_new_tokens=LONG, num_samples=4), gate)
    timer = threading.Timer(0.05, engine.interrupt)
    timer.start()
    assert engine.poll(timeout_seconds=60.0) == []
    timer.join()
    assert engine.num_running == 4


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "the prompt is empty"),
        ([1, 2, 100_000], "token id 100000; the vocabulary has ids 0 to"),
        ([1, -1], "token id -1"),
        ([1] * 512, "the prompt has 512 tokens and must leave room for one more"),
    ],
)
def test_invalid_prompt_is_rejected(make: MakeEngine, prompt: list[int], text: str) -> None:
    engine = make()
    with pytest.raises(PoisonSample, match=text):
        engine.submit(make_request(1, prompt=np.array(prompt, np.int32)))
    assert engine.num_running == 0


def test_invalid_sample_is_rejected_with_its_prompt_group(make: MakeEngine) -> None:
    engine = make()

    def request(
        sample_id: str, tokens: list[int], num_logprobs: int, seed: int = 1
    ) -> GenerationRequest:
        segments = (VersionSegment(0, len(tokens)),) if tokens else ()
        prefix, logprobs = np.array(tokens, np.int32), np.zeros(num_logprobs, np.float32)
        odd = SampleRequest(
            sample_id=sample_id, seed=seed, tokens=prefix, logprobs=logprobs, segments=segments
        )
        return replace(make_request(1, max_new_tokens=4), samples=(fresh_sample("b", 2), odd))

    for text, odd in {
        "sample b is already running": request("b", [], 0),
        "seed must be from 0": request("c", [], 0, seed=-1),
        "must have one length, got 2, 1 and 2": request("c", [1, 2], 1),
        "the prefix must have at most 4 tokens, got 5": request("c", [1] * 5, 5),
        "prefix has token id 5000": request("c", [5000], 1),
    }.items():
        with pytest.raises(PoisonSample, match=text):
            engine.submit(odd)
    assert engine.num_running == 0


def test_sample_that_runs_already_is_refused(make: MakeEngine, gate: Gate) -> None:
    engine = make()
    request = make_request(1, max_new_tokens=LONG)
    begin(engine, request, gate)
    with pytest.raises(PoisonSample, match="g1/0 is already running"):
        engine.submit(request)
    gate.open()
    assert len(finish(engine)) == 2
    engine.submit(request)  # what has finished or was aborted runs no longer
    engine.abort()
    engine.submit(request)
    assert len(finish(engine)) == 2
