"""Behaviour specific to engine `transformers`, bit for bit and step by step. `tests/engines` has
what every engine does.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import (
    bits,
    check_draws,
    check_misfits_are_refused,
    continued,
    finish,
    make_engine,
    make_prompt,
    make_request,
    other_weights,
    plain_logprobs,
    plain_model,
    step,
    tiny_model,
)
from transformers import AutoConfig, AutoModelForCausalLM, CohereConfig, MistralConfig

from relax_events.engines.protocol import Engine
from relax_events.engines.transformers import kv_cache
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.weights import Weights


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logprobs_agree_with_a_single_full_forward_pass(family: str, attention: str) -> None:
    path = tiny_model(family)
    engine = make_engine(path, model={"attention": attention})
    requests = [make_request(number, max_new_tokens=20) for number in range(6)]
    for request in requests:
        engine.submit(request)
    samples = finish(engine)
    assert len(samples) == 12
    for request in requests:
        for sample in request.samples:
            generated = samples[sample.sample_id]
            expected = plain_logprobs(request.prompt_tokens, generated.tokens, path=path)
            assert len(generated.tokens) == 20
            np.testing.assert_allclose(generated.logprobs, expected, atol=2e-5)


def test_top_k_of_one_takes_the_likeliest_token() -> None:
    engine = make_engine()
    request = make_request(1, num_samples=1, top_k=1, max_new_tokens=1)
    engine.submit(request)
    (sample,) = finish(engine).values()
    likeliest = max(
        range(256),
        key=lambda token: plain_logprobs(request.prompt_tokens, np.array([token], np.int32))[0],
    )
    assert sample.tokens.tolist() == [likeliest]


def test_restart_recomputes_running_samples_with_the_new_weights() -> None:
    engine = make_engine()
    request = make_request(1, max_new_tokens=12)
    engine.submit(request)
    step(engine, 4)
    weights, path = other_weights(1)
    engine.load_weights(weights, on_running="restart")
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(0, 5), VersionSegment(1, 7))
        old = plain_logprobs(request.prompt_tokens, sample.tokens)
        new = plain_logprobs(request.prompt_tokens, sample.tokens, path=path)
        np.testing.assert_allclose(sample.logprobs, np.concatenate([old[:5], new[5:]]), atol=2e-5)


def test_poll_returns_between_the_prefills_of_many_prompts() -> None:
    """Between polls a worker sends heartbeats and reads its control topics."""
    requests = [make_request(number, num_samples=2, max_new_tokens=3) for number in range(5)]
    engine, polls = make_engine(tiny_model("qwen3_5")), []  # whose prompts are prefilled one by one
    for request in requests:
        engine.submit(request)
    for _ in requests:
        polls.append((engine.usage.num_decoding, engine.num_running))
        assert engine.poll(timeout_seconds=0.0) == []
    assert polls == [(number, 10) for number in (0, 2, 4, 6, 8)]
    aborted = make_engine(tiny_model("qwen3_5"))
    for request in requests:
        aborted.submit(request)
    step(aborted, 2)
    aborted.abort(["g1/0", "g4/1"])
    assert (aborted.usage.num_decoding, aborted.usage.num_waiting) == (3, 5)
    whole, rest = finish(engine), finish(aborted)
    assert whole.keys() - rest.keys() == {"g1/0", "g4/1"}
    assert all(rest[name].tokens.tolist() == whole[name].tokens.tolist() for name in rest)


def test_swap_keeps_the_kv_cache_and_marks_the_segments() -> None:
    engine = make_engine()
    request = make_request(1, max_new_tokens=12)
    engine.submit(request)
    step(engine, 4)
    weights, path = other_weights(1)
    engine.load_weights(weights, on_running="swap")
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(0, 5), VersionSegment(1, 7, kept_cache=True))
        new = plain_logprobs(request.prompt_tokens, sample.tokens, path=path)
        assert np.abs(sample.logprobs[5:] - new[5:]).max() > 1e-2


def test_waiting_samples_start_under_the_newest_weights() -> None:
    engine = make_engine(max_running_samples=2)
    engine.submit(make_request(1))
    engine.submit(make_request(2))
    step(engine)
    engine.load_weights(other_weights(1)[0], on_running="swap")
    samples = finish(engine)
    assert samples["g1/0"].segments == (VersionSegment(0, 2), VersionSegment(1, 4, kept_cache=True))
    assert samples["g2/0"].segments == (VersionSegment(1, 6),)


def test_engine_serves_the_old_weights_after_rejecting_new_ones() -> None:
    engine, untouched = make_engine(), make_engine()
    check_misfits_are_refused(engine)
    assert engine.policy_version == 0
    for one in (engine, untouched):
        one.submit(make_request(1))
    assert {key: bits(sample) for key, sample in finish(engine).items()} == {
        key: bits(sample) for key, sample in finish(untouched).items()
    }


def test_aborted_samples_continue_from_their_last_token() -> None:
    engine = make_engine()
    request = make_request(1, num_samples=3, max_new_tokens=12)
    engine.submit(request)
    step(engine, 4)
    partial = engine.abort()
    begun = {one.sample_id: one for one in partial}
    assert {
        (len(one.tokens), len(one.logprobs), one.segments, one.finish_reason) for one in partial
    } == {(5, 5, (VersionSegment(0, 5),), FinishReason.ABORT)}
    assert engine.num_running == 0
    engine.submit(continued(request, partial))
    samples = finish(engine)
    for name, sample in samples.items():
        assert sample.tokens[:5].tobytes() == begun[name].tokens.tobytes()
        assert sample.logprobs[:5].tobytes() == begun[name].logprobs.tobytes()
        assert sample.segments == (VersionSegment(0, 12),)
    check_draws(samples, request)


def most_probable(prompt: np.ndarray, completion: np.ndarray, num_tokens: int) -> list[list[int]]:
    """Sort the vocabulary at each generated token, from one whole forward in float64."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.no_grad():
        logits = plain_model(tiny_model())(ids).logits[0][len(prompt) - 1 : -1]
    order: list[list[int]] = np.argsort(-logits.numpy(), axis=-1)[:, :num_tokens].tolist()
    return order


def test_top_tokens_are_returned_with_sampled_tokens_on_request() -> None:
    engine = make_engine()
    requests = [
        make_request(1),
        make_request(2, num_top=3, temperature=0.7, top_k=2),
        make_request(3, num_top=5),
    ]
    engine.submit(requests[0])
    step(engine)
    for request in requests[
        1:
    ]:  # which join while others run, and need more than the rows before them
        engine.submit(request)
    samples = finish(engine)
    assert [samples[f"g1/{index}"].top_tokens for index in range(2)] == [None, None]
    for request in requests[1:]:
        for one in request.samples:
            sample = samples[one.sample_id]
            assert sample.top_tokens is not None
            assert sample.top_tokens.dtype == np.int32
            assert sample.top_tokens.tolist() == most_probable(
                request.prompt_tokens, sample.tokens, request.num_top_tokens
            )
    check_draws(samples, requests[0], requests[2])


def test_top_tokens_of_an_aborted_sample_continue_from_its_last_token() -> None:
    engine = make_engine()
    request = make_request(1, num_samples=3, num_top=4, max_new_tokens=12)
    engine.submit(request)
    whole = finish(engine)
    engine.submit(request)
    step(engine, 4)
    partial = engine.abort()
    engine.submit(continued(request, partial))
    step(engine, 2)
    engine.load_weights(Weights(1, dict(plain_weights()), bytes(32)), on_running="restart")
    for name, sample in finish(engine).items():
        expected = whole[name].top_tokens
        assert sample.top_tokens is not None
        assert expected is not None
        assert sample.top_tokens.tolist() == expected.tolist()
    short = replace(
        request,
        samples=tuple(replace(one, top_tokens=None) for one in continued(request, partial).samples),
    )
    with pytest.raises(
        PoisonSample,
        match=r"sample g1/0: the prefix's top_tokens must have the shape \(5, 4\), got \(0, 4\)",
    ):
        engine.submit(short)
    with pytest.raises(
        PoisonSample, match=r"num_top_tokens must be at most the vocabulary's \d+, got 100000"
    ):
        engine.submit(make_request(1, num_top=100_000))


def plain_weights() -> dict[str, torch.Tensor]:
    """Return the weights of the tiny model itself, which a restart under them changes nothing of."""
    return dict(AutoModelForCausalLM.from_pretrained(tiny_model()).named_parameters())


def test_abort_removes_only_the_named_samples() -> None:
    engine = make_engine(max_running_samples=2)
    engine.submit(make_request(1))
    engine.submit(make_request(2))
    step(engine)
    aborted = engine.abort(["g1/1", "g2/0", "unknown"])
    assert {one.sample_id: len(one.tokens) for one in aborted} == {"g1/1": 2, "g2/0": 0}
    assert finish(engine).keys() == {"g1/0", "g2/1"}


def test_abort_of_other_samples_does_not_change_sampling() -> None:
    engine, request = make_engine(), make_request(1, num_samples=6, max_new_tokens=20)
    engine.submit(request)
    step(engine, 3)
    engine.abort(["g1/0", "g1/3", "g1/4"])
    check_draws(
        finish(engine),
        replace(request, samples=tuple(request.samples[index] for index in (1, 2, 5))),
    )


def test_sleep_frees_the_cache_and_wake_resumes_generation() -> None:
    engine = make_engine()
    request = make_request(1, max_new_tokens=12)
    engine.submit(request)
    step(engine, 3)
    assert engine.cache_bytes > 0
    engine.sleep()
    assert engine.cache_bytes == 0
    assert engine.poll(timeout_seconds=3600.0) == []
    assert engine.num_running == 2
    engine.wake()
    check_draws(finish(engine), request)


def test_cache_follows_the_longest_running_sample_where_it_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "KEPT_BYTES", 8 * 64 * 16 * 4 * 2 * 2)
    engine = make_engine(max_context_tokens=512)
    engine.submit(make_request(1, num_samples=1, prompt=make_prompt(1, 400)))
    step(engine)
    long = engine.cache_bytes
    finish(engine)
    engine.submit(make_request(2, num_samples=1, prompt=make_prompt(2, 8)))
    step(engine)
    # By hand: one key head of width 16, keys and values of 2 layers in float32, 8 rows padded of 64
    # tokens at least.
    small = engine.cache_bytes
    assert small == 8 * 64 * 16 * 4 * 2 * 2
    assert long >= 8 * 400 * 16 * 4 * 2 * 2
    finish(engine)
    storage = [layer.tensors[0].data_ptr() for layer in engine._cache._layers]
    engine.submit(make_request(3, num_samples=1, prompt=make_prompt(3, 8)))
    step(engine)
    assert [layer.tensors[0].data_ptr() for layer in engine._cache._layers] == storage


def test_non_finite_weights_end_samples_with_an_error() -> None:
    engine = make_engine()
    weights, _ = other_weights(1)
    engine.submit(make_request(1))
    step(engine)
    broken = Weights(
        1,
        weights.tensors
        | {"model.layers.0.self_attn.v_proj.weight": torch.full((16, 32), torch.nan)},
        bytes(32),
    )
    engine.load_weights(broken, on_running="swap")
    engine.submit(make_request(2))
    samples = finish(engine)
    assert len(samples) == 4
    for sample in samples.values():
        assert sample.finish_reason is FinishReason.ERROR
        assert "policy version 1 returned a non-finite log-probability at token" in sample.error


def test_row_that_held_nan_values_serves_the_next_sample_correctly() -> None:
    engine, poison = make_engine(max_running_samples=2), 260
    weights, path = other_weights(1)
    weights.tensors["model.embed_tokens.weight"][poison] = torch.nan
    company = make_request(1, num_samples=1, prompt=make_prompt(1, 40), max_new_tokens=60)
    short = make_request(2, num_samples=1, prompt=make_prompt(2, 3), max_new_tokens=20)
    engine.load_weights(weights)
    engine.submit(company)
    engine.submit(make_request(3, num_samples=1, prompt=np.full(60, poison, np.int32)))
    engine.submit(short)
    samples = finish(engine)
    assert samples.pop("g3/0").finish_reason is FinishReason.ERROR
    assert {sample.finish_reason for sample in samples.values()} == {FinishReason.LENGTH}
    check_draws(samples, company, short, path=path)


def test_missing_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        make_engine(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be loaded as a causal language model"):
        make_engine(tmp_path)


def test_unsupported_model_architecture_is_a_config_error(tmp_path: Path) -> None:
    size = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    models = {
        "sliding_attention": MistralConfig(**size, sliding_window=16),
        "more than a linear head": CohereConfig(
            **size, logit_scale=0.5, eos_token_id=1, bos_token_id=1, pad_token_id=1
        ),
    }
    for text, config in models.items():
        path = tmp_path / config.model_type
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        with pytest.raises(ConfigError, match=text):
            make_engine(path)


def test_tied_embeddings_follow_the_weights(tmp_path: Path) -> None:
    shape = AutoConfig.from_pretrained(tiny_model())
    shape.tie_word_embeddings = True
    torch.manual_seed(1)
    for name in ("first", "second"):
        AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / name)
    tensors = {
        name: parameter.detach()
        for name, parameter in AutoModelForCausalLM.from_pretrained(
            tmp_path / "second"
        ).named_parameters()
    }
    assert "lm_head.weight" not in tensors
    engine = make_engine(tmp_path / "first")
    engine.load_weights(Weights(1, tensors, bytes(32)))
    request = make_request(1)
    engine.submit(request)
    for sample in finish(engine).values():
        np.testing.assert_allclose(
            sample.logprobs,
            plain_logprobs(request.prompt_tokens, sample.tokens, path=tmp_path / "second"),
            atol=2e-5,
        )


def test_unknown_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.device = 'abacus' is not a device"):
        make_engine(model={"device": "abacus"})


def test_engine_satisfies_the_protocol() -> None:
    engine: Engine = make_engine()
    engine.submit(make_request(1))
    engine.close()
    assert engine.num_running == 0
