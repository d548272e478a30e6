"""Computing without a model's modules: the same bits as with them, and which models it is for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import bits, finish, make_engine, make_request, tiny_model
from plain_models import write_plain_model
from structlog.testing import capture_logs

from relax_events.config import ModelConfig
from relax_events.engines.transformers.causal_model import CausalModel
from relax_events.engines.transformers.kv_cache import RowCache
from relax_events.models import direct_model
from relax_events.weights import Weights

LENGTH = 16


def open_model(folder: Path, family: str, dtype: str = "float32", **shape: Any) -> CausalModel:
    write_plain_model(folder, family, dtype, **shape)
    return CausalModel(folder, config=ModelConfig(path=folder, dtype=dtype, device="cpu"))


@torch.inference_mode()
def compute(model: CausalModel, num_rows: int, num_tokens: int) -> torch.Tensor:
    """Return the logits of a prefill and of three steps after it, rows at unequal positions."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(model.vocab_size, (num_rows, LENGTH), generator=generator)
    prefilled, prompts = model.prefill(tokens, torch.full((num_rows,), LENGTH - 1))
    cache, rows = RowCache(max_rows=num_rows, max_tokens=num_tokens), range(num_rows)
    cache.fill(rows, prompts, sources=rows, num_tokens=LENGTH)
    positions = torch.randint(LENGTH // 2, LENGTH + 1, (num_rows,), generator=generator)
    zeros = torch.zeros_like(positions)
    steps = [
        model.decode(tokens[:, step], positions + step, cache, num_tokens=num_tokens, shifts=zeros)
        for step in range(3)
    ]
    return torch.cat([prefilled, *steps])


@pytest.mark.parametrize(
    ("family", "dtype", "shape"),
    [
        ("qwen3", "float32", {}),
        ("qwen3", "float32", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3", "bfloat16", {}),
        ("qwen2", "float32", {"head_dim": 8}),
        ("llama", "float32", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_direct_model_gives_the_bits_of_the_modules(
    tmp_path: Path, family: str, dtype: str, shape: dict[str, Any]
) -> None:
    model = open_model(tmp_path, family, dtype, **shape)
    assert model._direct is not None
    for num_rows, num_tokens in ((8, 32), (40, 48), (104, 32)):
        direct = compute(model, num_rows, num_tokens)
        way, model._direct = model._direct, None
        assert torch.equal(direct, compute(model, num_rows, num_tokens))
        model._direct = way


def test_direct_model_follows_new_weights() -> None:
    path, other = tiny_model(), tiny_model(seed=4)
    engine, fresh = make_engine(path), make_engine(other)
    engine.load_weights(Weights(1, engine.read_weights(other), b""))
    for one in (engine, fresh):
        one.submit(make_request(1))
    ours, theirs = finish(engine), finish(fresh)
    assert {name: bits(sample) for name, sample in ours.items()} == {
        name: bits(sample) for name, sample in theirs.items()
    }


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("qwen3", {"lora": {"rank": 2}})]
)
def test_models_of_another_form_are_computed_by_their_modules(
    family: str, changes: dict[str, Any]
) -> None:
    assert make_engine(tiny_model(family), model=changes)._model._direct is None


def test_model_whose_modules_compute_something_else_is_computed_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rotate_otherwise(heads: Any, cos: Any, sin: Any) -> Any:
        del sin
        return heads * cos

    monkeypatch.setattr(direct_model, "_rotate", rotate_otherwise)
    with capture_logs() as logs:
        assert make_engine()._model._direct is None
    (logged,) = (line for line in logs if line["event"] == "direct_model.differs")
    assert logged["largest"] > 0
