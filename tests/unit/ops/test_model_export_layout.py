"""Which tensors an exported folder holds, where each comes from, and in which file it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from relax_events.errors import WeightsError
from relax_events.model_folder.tensors import TensorLayout
from relax_events.models.parameters import ModelParameters
from relax_events.ops.model_export.layout import (
    ExportedTensor,
    TrainedPart,
    count_trained,
    natural_order,
    plan_tensors,
    split_into_shards,
)

BASE: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
EXPERTS: dict[str, tuple[int, ...]] = {
    f"m.mlp.experts.{expert}.{part}.weight": shape
    for expert in range(2)
    for part, shape in (("gate_proj", (3, 4)), ("up_proj", (3, 4)), ("down_proj", (4, 3)))
}
FUSED: dict[str, tuple[int, ...]] = {
    "m.mlp.experts.gate_up_proj": (2, 6, 4),
    "m.mlp.experts.down_proj": (2, 4, 3),
}


def layouts(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, TensorLayout]:
    return {name: TensorLayout(dtype, shape) for name, shape in shapes.items()}


def plan(
    base: dict[str, tuple[int, ...]],
    trained: dict[str, tuple[int, ...]],
    *,
    parameters: dict[str, tuple[int, ...]] | None = None,
    tied: dict[str, str] | None = None,
    frozen: Iterable[str] = (),
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32"),
) -> list[ExportedTensor]:
    known = ModelParameters(parameters or trained, tied or {}, frozenset(frozen))
    of_base, published, wanted = dtypes
    return plan_tensors(layouts(base, of_base), layouts(trained, published), known, dtype=wanted)


def without(shapes: dict[str, tuple[int, ...]], name: str) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in shapes.items() if key != name}


def test_every_tensor_of_the_base_comes_from_the_published_ones() -> None:
    planned = plan(BASE, BASE)
    assert [tensor.name for tensor in planned] == sorted(BASE)
    assert [tensor.source for tensor in planned] == [TrainedPart(name) for name in sorted(BASE)]
    assert count_trained(planned) == 3


def test_tied_head_that_the_base_repeats_is_the_embedding() -> None:
    trained = without(BASE, "lm_head.weight")
    planned = plan(BASE, trained, tied={"lm_head.weight": "model.embed_tokens.weight"})
    assert planned[0].name == "lm_head.weight"
    assert planned[0].source == TrainedPart("model.embed_tokens.weight")


def test_head_that_was_published_although_the_config_ties_it_is_its_own() -> None:
    planned = plan(
        BASE,
        BASE,
        parameters=without(BASE, "lm_head.weight"),
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )
    assert planned[0].source == TrainedPart("lm_head.weight")


def test_experts_are_parts_of_the_fused_tensors() -> None:
    sources = {tensor.name: tensor.source for tensor in plan(EXPERTS, FUSED)}
    assert sources["m.mlp.experts.1.gate_proj.weight"] == TrainedPart(
        "m.mlp.experts.gate_up_proj", 1, (0, 2)
    )
    assert sources["m.mlp.experts.1.up_proj.weight"] == TrainedPart(
        "m.mlp.experts.gate_up_proj", 1, (1, 2)
    )
    assert sources["m.mlp.experts.0.down_proj.weight"] == TrainedPart(
        "m.mlp.experts.down_proj", 0, (0, 1)
    )


def test_prefix_of_a_thinker_and_other_parts_are_known() -> None:
    base = {f"thinker.{name}": shape for name, shape in BASE.items()}
    planned = plan({**base, "talker.x": (1,), "code2wav.y": (2,)}, BASE)
    own = {tensor.name: tensor.source for tensor in planned}
    assert own["thinker.lm_head.weight"] == TrainedPart("lm_head.weight")
    assert (own["talker.x"], own["code2wav.y"]) == (None, None)


def test_tensor_that_is_no_parameter_comes_from_the_base() -> None:
    planned = plan(
        {**BASE, "mtp.layers.0.weight": (2, 2)}, BASE, dtypes=("bfloat16",) + ("float32",) * 2
    )
    extra = next(tensor for tensor in planned if tensor.name.startswith("mtp"))
    assert (extra.source, extra.layout.dtype) == (None, "bfloat16")
    assert {tensor.layout.dtype for tensor in planned if tensor.source} == {"float32"}


def test_frozen_parameter_that_was_not_published_comes_from_the_base() -> None:
    trained = without(BASE, "model.embed_tokens.weight")
    planned = plan(BASE, trained, parameters=BASE, frozen=["model.embed_tokens.weight"])
    assert [tensor.source for tensor in planned].count(None) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"trained": without(BASE, "lm_head.weight"), "parameters": BASE},
            "the run published no lm_head.weight, which the base model has (1 such in all)",
        ),
        (
            {"trained": {**BASE, "model.extra": (1,)}, "parameters": BASE},
            "the base model has no parameter model.extra, which the run published",
        ),
        (
            {"trained": {**BASE, "lm_head.weight": (11, 4)}, "parameters": BASE},
            "lm_head.weight must be [10, 4] as in the base model, the run published [11, 4]",
        ),
        (
            {"base": {**BASE, "lm_head.weight": (4, 10)}},
            "lm_head.weight is [4, 10] in the base folder, and the run published [10, 4]",
        ),
        (
            {"base": without(BASE, "lm_head.weight")},
            "the base folder has no tensor that holds lm_head.weight",
        ),
        (
            {"dtypes": ("bfloat16", "float16", "float32")},
            "lm_head.weight must be float32 as model.dtype or bfloat16 as in the base model, the run published float16",
        ),
        (
            {"base": without(EXPERTS, "m.mlp.experts.1.up_proj.weight"), "trained": FUSED},
            "the base folder holds 3 of the 4 tensors that m.mlp.experts.gate_up_proj is made of",
        ),
        (
            {"base": {**EXPERTS, "m.mlp.experts.2.up_proj.weight": (3, 4)}, "trained": FUSED},
            "m.mlp.experts.2.up_proj.weight is [3, 4] in the base folder, and the run published [2, 6, 4]",
        ),
    ],
)
def test_tensor_that_does_not_fit_is_named_with_the_remedy(
    change: dict[str, Any], text: str
) -> None:
    settings = {"base": BASE, "trained": BASE, **change}
    with pytest.raises(WeightsError) as refused:
        plan(settings.pop("base"), settings.pop("trained"), **settings)
    assert text in str(refused.value)
    assert "give the run's base model as --base" in str(refused.value)


def test_names_are_ordered_by_the_numbers_in_them() -> None:
    names = ["a.10.b", "a.2.b", "a.2.a", "b.1"]
    assert sorted(names, key=natural_order) == ["a.2.a", "a.2.b", "a.10.b", "b.1"]


@pytest.mark.parametrize(
    ("max_shard_bytes", "expected"),
    [
        (1000, [["a", "b", "c", "d"]]),
        (40, [["a", "b"], ["c"], ["d"]]),
        (24, [["a"], ["b"], ["c"], ["d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
        (84, [["a", "b"], ["c", "d"]]),
    ],
)
def test_shards_are_filled_in_order_up_to_their_size(
    max_shard_bytes: int, expected: list[list[str]]
) -> None:
    sizes = {"a": 4, "b": 6, "c": 20, "d": 1}
    tensors = [
        ExportedTensor(name, TensorLayout("float32", (size,))) for name, size in sizes.items()
    ]
    shards = split_into_shards(tensors, max_shard_bytes=max_shard_bytes)
    assert [[tensor.name for tensor in shard] for shard in shards] == expected
