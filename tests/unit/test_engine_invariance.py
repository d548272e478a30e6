"""A sample's bits don't depend on what runs beside it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_requests import bits, finish, make_engine, make_request, tiny_model

from relax_events.config import ModelConfig
from relax_events.engines.causal_model import CausalModel
from relax_events.engines.invariance import RowRule, measure_invariance
from relax_events.engines.protocol import GeneratedSample
from relax_events.engines.transformers import TransformersEngine

NUM_GROUPS = 12
STOPS = (7, 40)


@pytest.fixture(params=["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(threads)


def one_by_one(engine: TransformersEngine) -> dict[str, tuple[bytes, bytes]]:
    samples: dict[str, GeneratedSample] = {}
    for number in range(NUM_GROUPS):
        request = make_request(number, num_samples=3, max_new_tokens=10, stops=STOPS)
        for sample in request.samples:
            engine.submit(replace(request, samples=(sample,)))
            samples |= finish(engine)
    return {name: bits(sample) for name, sample in samples.items()}


def in_random_company(engine: TransformersEngine, seed: int) -> dict[str, tuple[bytes, bytes]]:
    """Submit prompt groups in random order, some while others run, among samples that are aborted again."""
    generator = random.Random(seed)
    numbers = list(range(NUM_GROUPS))
    generator.shuffle(numbers)
    samples: dict[str, GeneratedSample] = {}
    while numbers or engine.num_running:
        for _ in range(generator.randrange(4)):
            if numbers:
                number = numbers.pop()
                engine.submit(make_request(number, num_samples=3, max_new_tokens=10, stops=STOPS))
                engine.submit(make_request(100 + number, num_samples=1, max_new_tokens=50, top_p=0.9))
        samples |= {sample.sample_id: sample for sample in engine.poll(timeout_seconds=0.0)}
        if generator.random() < 0.3:
            engine.abort([f"g{100 + generator.randrange(NUM_GROUPS)}/0"])
    return {name: bits(sample) for name, sample in samples.items() if int(name[1:].split("/")[0]) < 100}


def test_samples_are_the_same_bits_alone_and_in_random_company(family: str) -> None:
    alone = one_by_one(make_engine(tiny_model(family)))
    assert len(alone) == 3 * NUM_GROUPS
    for seed, max_running_samples in enumerate((3, 16, 40)):
        engine = make_engine(tiny_model(family), max_running_samples=max_running_samples)
        assert in_random_company(engine, seed) == alone


@pytest.mark.parametrize("rule", [RowRule(True, 16, True), RowRule(True, 64, False)], ids=["at least 16 rows", "most rows, prompts alone"])
def test_samples_by_a_stricter_rule_are_the_same_bits(family: str, rule: RowRule, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = one_by_one(make_engine(tiny_model(family)))
    monkeypatch.setattr("relax_events.engines.transformers.measure_invariance", lambda *_, **__: rule)
    assert in_random_company(make_engine(tiny_model(family)), 5) == alone


def test_measurement_finds_that_rows_may_vary_on_one_thread(family: str) -> None:
    make_engine(tiny_model(family))  # sets the threads
    model = CausalModel(tiny_model(family), config=ModelConfig(path=tiny_model(family), device="cpu"))
    rule = measure_invariance(model, max_rows=32)
    assert rule.is_exact
    assert rule.min_rows <= 2 * model.row_block
    assert rule.prefills_together or not model.pads_prompts  # which go alone anyway


@pytest.mark.parametrize(
    ("family", "dtype", "num_rows"), [("qwen3_moe", "float32", 8), ("qwen3_5_moe", "float32", 32), ("qwen3_5_moe", "bfloat16", 64)]
)
def test_rows_of_a_step_fill_vectors_where_a_gate_gives_one_number(family: str, dtype: Any, num_rows: int) -> None:
    path = tiny_model(family)
    assert CausalModel(path, config=ModelConfig(path=path, device="cpu", dtype=dtype)).row_block == num_rows


@pytest.mark.parametrize(
    ("error_of", "expected"),
    [
        (len, RowRule(is_exact=True, min_rows=64, prefills_together=True)),
        (lambda tokens: float(len(tokens) < 32), RowRule(is_exact=True, min_rows=32, prefills_together=True)),
        (lambda tokens: torch.arange(len(tokens))[:, None], RowRule(is_exact=False, min_rows=8, prefills_together=True)),
    ],
    ids=["by the number of rows", "by few rows", "by place"],
)
def test_measurement_sees_how_rows_round(error_of: Any, expected: RowRule, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(tiny_model(), config=ModelConfig(path=tiny_model(), device="cpu"))
    exact = model.decode

    def rounded(tokens: torch.Tensor, *arguments: torch.Tensor, **settings: int) -> torch.Tensor:
        return exact(tokens, *arguments, **settings) + 1e-4 * error_of(tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "decode", rounded)
    assert measure_invariance(model, max_rows=64) == expected


def test_measurement_sees_prompts_that_round_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(tiny_model(), config=ModelConfig(path=tiny_model(), device="cpu"))
    exact = model.prefill

    def rounded(ids: torch.Tensor, last: torch.Tensor) -> Any:
        logits, cache = exact(ids, last)
        return logits + 1e-4 * len(ids), cache

    monkeypatch.setattr(model, "prefill", rounded)
    rule = measure_invariance(model, max_rows=64)
    assert rule.is_exact
    assert not rule.prefills_together


def test_same_seeds_give_the_same_bits_and_others_do_not() -> None:
    first, second = make_engine(), make_engine()
    for engine in (first, second):
        engine.submit(make_request(1, num_samples=2, max_new_tokens=20))
    one, two = finish(first), finish(second)
    assert {name: bits(sample) for name, sample in one.items()} == {name: bits(sample) for name, sample in two.items()}
    assert bits(one["g1/0"]) != bits(one["g1/1"])
