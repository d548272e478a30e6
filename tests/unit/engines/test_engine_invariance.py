"""Batch invariance: a sample's tokens depend on its seed and its model alone, not on other rows of
the batch; and the measurement of how rounding depends on the number of rows."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_requests import bits, check_draws, finish, make_engine, make_request, tiny_model

from relax_events.config import ModelConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.transformers.causal_model import CausalModel
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.engines.transformers.invariance import PaddingRule, measure_invariance
from relax_events.engines.transformers.kv_cache import RowCache

NUM_GROUPS = 12
STOPS = (7, 40)


@pytest.fixture(params=["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(threads)


def asked(number: int) -> GenerationRequest:
    return make_request(number, num_samples=3, max_new_tokens=10, stops=STOPS)


def in_random_company(engine: TransformersEngine, seed: int) -> dict[str, GeneratedSample]:
    """Submit prompt groups in random order, some while others run, among samples that are aborted
    again."""
    generator = random.Random(seed)
    numbers = list(range(NUM_GROUPS))
    generator.shuffle(numbers)
    samples: dict[str, GeneratedSample] = {}
    while numbers or engine.num_running:
        for _ in range(generator.randrange(4)):
            if numbers:
                number = numbers.pop()
                engine.submit(asked(number))
                engine.submit(
                    make_request(100 + number, num_samples=1, max_new_tokens=50, top_p=0.9)
                )
        samples |= {sample.sample_id: sample for sample in engine.poll(timeout_seconds=0.0)}
        if generator.random() < 0.3:
            engine.abort([f"g{100 + generator.randrange(NUM_GROUPS)}/0"])
    return samples


def test_samples_depend_only_on_their_seed_in_random_batches(family: str) -> None:
    for seed, max_running_samples in enumerate((3, 16, 40)):
        engine = make_engine(tiny_model(family), max_running_samples=max_running_samples)
        check_draws(
            in_random_company(engine, seed), *map(asked, range(NUM_GROUPS)), path=tiny_model(family)
        )


@pytest.mark.parametrize(
    "rule",
    [PaddingRule(True, 16, True), PaddingRule(True, 64, False)],
    ids=["at least 16 rows", "most rows, prompts alone"],
)
def test_samples_depend_only_on_their_seed_under_a_stricter_padding_rule(
    family: str, rule: PaddingRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "relax_events.engines.transformers.engine.measure_invariance", lambda *_, **__: rule
    )
    samples = in_random_company(make_engine(tiny_model(family)), 5)
    check_draws(samples, *map(asked, range(NUM_GROUPS)), path=tiny_model(family))


def test_one_sample_at_a_time_gives_identical_bits_in_any_order(family: str) -> None:
    """It is computed alone then, at shapes that follow from itself: one computation, repeated."""
    sampled = []
    for order in (range(NUM_GROUPS), reversed(range(NUM_GROUPS))):
        engine = make_engine(tiny_model(family), max_running_samples=1)
        for number in order:
            engine.submit(asked(number))
        sampled.append({name: bits(sample) for name, sample in finish(engine).items()})
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize(
    ("family", "dtype", "num_rows"),
    [("qwen3_moe", "float32", 8), ("qwen3_5_moe", "float32", 32), ("qwen3_5_moe", "bfloat16", 64)],
)
def test_row_block_makes_layer_outputs_fill_whole_vectors(
    family: str, dtype: Any, num_rows: int
) -> None:
    path = tiny_model(family)
    assert (
        CausalModel(path, config=ModelConfig(path=path, device="cpu", dtype=dtype)).row_block
        == num_rows
    )


@pytest.mark.parametrize(
    ("error_of", "expected"),
    [
        (len, PaddingRule(agrees=True, min_rows=64, prefills_together=True)),
        (
            lambda tokens: float(len(tokens) < 32),
            PaddingRule(agrees=True, min_rows=32, prefills_together=True),
        ),
        (
            lambda tokens: torch.arange(len(tokens))[:, None],
            PaddingRule(agrees=False, min_rows=8, prefills_together=True),
        ),
    ],
    ids=["by the number of rows", "by few rows", "by row index"],
)
def test_invariance_measurement_finds_how_rounding_depends_on_rows(
    error_of: Any, expected: PaddingRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rounding(monkeypatch, of_step=error_of)
    assert measure_invariance(model, max_rows=64, max_tokens=1024) == expected


def test_invariance_measurement_detects_rounding_of_joint_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = measure_invariance(rounding(monkeypatch, of_prompts=len), max_rows=64, max_tokens=1024)
    assert rule.agrees
    assert not rule.prefills_together


@pytest.mark.parametrize("max_bytes", [2**30, 2**21], ids=["all rows", "rows that fit"])
def test_invariance_measurement_takes_no_more_memory_than_the_engine_may(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe of 256 rows of 1,024 tokens took 12 GB for a model of 0.5 GB."""
    probed: list[tuple[int, int, RowCache]] = []

    def record(*, max_rows: int, max_tokens: int) -> RowCache:
        probed.append((max_rows, max_tokens, RowCache(max_rows=max_rows, max_tokens=max_tokens)))
        return probed[-1][2]

    monkeypatch.setattr("relax_events.engines.transformers.invariance.RowCache", record)
    model = rounding(monkeypatch)
    rule = measure_invariance(model, max_rows=256, max_tokens=256, max_bytes=max_bytes)
    assert rule.agrees
    assert max(num_tokens for _, num_tokens, _ in probed) == 128, "1,024 is beyond the context"
    assert max(cache.num_bytes for *_, cache in probed) <= max_bytes
    most = max(num_rows for num_rows, *_ in probed)
    assert most == 256 if max_bytes == 2**30 else model.row_block <= most < 256
    assert rule.min_rows <= most


def rounding(
    monkeypatch: pytest.MonkeyPatch,
    *,
    of_step: Any = lambda _: 0.0,
    of_prompts: Any = lambda _: 0.0,
) -> CausalModel:
    """Return a model whose logits are given errors alone, independent of this machine's kernels."""
    model = CausalModel(
        tiny_model(), config=ModelConfig(dtype="float32", path=tiny_model(), device="cpu")
    )
    prefill = model.prefill

    def prefilled(ids: torch.Tensor, last: torch.Tensor) -> Any:
        logits, cache = prefill(ids, last)
        return torch.zeros_like(logits) + of_prompts(ids), cache

    def decoded(tokens: torch.Tensor, *_: torch.Tensor, **__: Any) -> torch.Tensor:
        return torch.zeros(len(tokens), model.vocab_size) + of_step(tokens)

    monkeypatch.setattr(model, "prefill", prefilled)
    monkeypatch.setattr(model, "decode", decoded)
    return model


def test_same_seeds_give_identical_samples_and_other_seeds_do_not() -> None:
    first, second = make_engine(), make_engine()
    for engine in (first, second):
        engine.submit(make_request(1, num_samples=2, max_new_tokens=20))
    one, two = finish(first), finish(second)
    assert {name: bits(sample) for name, sample in one.items()} == {
        name: bits(sample) for name, sample in two.items()
    }
    assert bits(one["g1/0"]) != bits(one["g1/1"])
