"""The tables between transformers' parameters and megatron-core's, for published models: names and
shapes alone, no weight is allocated."""

from collections import defaultdict
from itertools import combinations, pairwise
from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from relax_events.config.topology import Topology
from relax_events.errors import ConfigError
from relax_events.packages.megatron.layout import full_shapes, holds_first_copy, rank_shards
from relax_events.packages.megatron.sizes import DecoderSizes

pytestmark = pytest.mark.unit
QWEN3_4B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
"""Of the `config.json` that Qwen publishes with each model."""
PUBLISHED = {"4B": QWEN3_4B, "30B-A3B": QWEN3_30B_A3B}
LAYOUTS = {
    "4B": [
        Topology.of(8, tensor=4, pipeline=2),
        Topology.of(8, tensor=8),
        Topology.of(12, pipeline=3, context=2, tensor=2),
        Topology.of(4, tensor=2, pipeline=2, chunks=3),
    ],
    "30B-A3B": [
        Topology.of(16, tensor=4, pipeline=2, expert=8),
        Topology.of(64, tensor=4, pipeline=2, expert=32),
        Topology.of(8, pipeline=4, expert=2),
        Topology.of(16, tensor=4, pipeline=2, expert=8, chunks=4),
        Topology.of(8, tensor=2, context=2, expert=2, expert_tensor=2),
    ],
}
CASES = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]


def sizes_of(settings):
    return DecoderSizes.from_settings(settings, path="a folder")


@pytest.mark.parametrize("model", PUBLISHED)
def test_names_and_shapes_are_those_of_transformers(model):
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED[model]))
    expected = {name: tuple(one.shape) for name, one in module.named_parameters()}
    assert full_shapes(sizes_of(PUBLISHED[model])) == expected


@pytest.mark.parametrize(("model", "topology"), CASES)
def test_ranks_hold_every_element_exactly_once(model, topology):
    sizes = sizes_of(PUBLISHED[model])
    sizes.require_fits(topology)
    boxes = defaultdict(list)
    for rank in range(topology.num_ranks):
        at = topology.at(rank)
        for shard in rank_shards(sizes, topology, at):
            if holds_first_copy(shard, at):
                for piece in shard.pieces:
                    boxes[piece.name].append(piece.source)
    shapes = full_shapes(sizes)
    assert boxes.keys() == shapes.keys()
    for name, shape in shapes.items():
        assert sum(prod(end - start for start, end in box) for box in boxes[name]) == prod(shape)
        assert all(0 <= start < end <= size for box in boxes[name] for (start, end), size in
                   zip(box, shape, strict=True))  # fmt: skip
        by_first = defaultdict(list)
        for box in boxes[name]:
            by_first[box[0]].append(box)
        firsts = sorted(by_first)
        assert all(before[1] <= after[0] for before, after in pairwise(firsts))
        for alike in by_first.values():
            for one, other in combinations(alike, 2):
                assert any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True)), (
                    name,
                    one,
                    other,
                )


@pytest.mark.parametrize("model", PUBLISHED)
def test_critic_has_a_scalar_head_in_place_of_the_output_head(model):
    sizes = sizes_of(PUBLISHED[model])
    policy, critic = full_shapes(sizes), full_shapes(sizes.as_critic())
    policy.pop("lm_head.weight", None)
    assert critic == policy | {"weight": (sizes.hidden_size,), "bias": (1,)}
    topology = Topology.of(8, tensor=2, pipeline=4)
    for rank in range(8):
        shards = list(rank_shards(sizes.as_critic(), topology, topology.at(rank)))
        assert sum(shard.is_new for shard in shards) == (2 if rank >= 6 else 0)
        assert not any("output_layer" in shard.name for shard in shards)


@pytest.mark.parametrize(("model", "topology"), CASES)
def test_pieces_fill_every_shard_but_the_padding(model, topology):
    sizes = sizes_of(PUBLISHED[model])
    for rank in range(topology.num_ranks):
        for shard in rank_shards(sizes, topology, topology.at(rank)):
            filled = 0
            for piece in shard.pieces:
                source = [end - start for start, end in piece.source]
                target = [end - start for start, end in piece.target]
                assert source in (target, [1, *target])
                filled += prod(target)
            assert filled == prod(shard.shape)


def test_chunks_of_layers_are_dealt_out_over_the_stages_in_turn():
    sizes = sizes_of(QWEN3_4B | {"num_hidden_layers": 8})
    topology = Topology.of(2, pipeline=2, chunks=2)
    held = [
        {
            shard.name.partition(".self")[0]: shard.pieces[0].name.split(".")[2]
            for shard in rank_shards(sizes, topology, topology.at(rank))
            if shard.name.endswith("linear_proj.weight")
        }
        for rank in range(2)
    ]
    layers = [f"{chunk}.decoder.layers.{layer}" for chunk in range(2) for layer in range(2)]
    assert held == [dict(zip(layers, numbers, strict=True)) for numbers in ("0145", "2367")]
    (copy,) = [shard for shard in rank_shards(sizes, topology, topology.at(1)) if shard.is_copy]
    assert copy.name == "1.output_layer.weight"


def test_padding_of_an_odd_vocabulary_is_in_no_piece():
    sizes = sizes_of(QWEN3_4B | {"vocab_size": 9})
    topology = Topology.of(4, tensor=4)
    shards = [next(rank_shards(sizes, topology, topology.at(rank))) for rank in range(4)]
    assert [shard.shape[0] for shard in shards] == [3] * 4
    assert [[piece.source[0] for piece in shard.pieces] for shard in shards] == [
        [(0, 3)],
        [(3, 6)],
        [(6, 9)],
        [],
    ]


def test_queries_keys_and_values_of_a_group_lie_together():
    topology = Topology.of(4, tensor=4)
    shards = rank_shards(sizes_of(QWEN3_4B), topology, topology.at(1))
    shard = next(one for one in shards if one.name.endswith("0.self_attention.linear_qkv.weight"))
    parts = [(piece.name.split(".")[-2], piece.source[0]) for piece in shard.pieces]
    assert parts == [
        ("q_proj", (1024, 1536)),
        ("k_proj", (256, 384)),
        ("v_proj", (256, 384)),
        ("q_proj", (1536, 2048)),
        ("k_proj", (384, 512)),
        ("v_proj", (384, 512)),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model_type": "qwen3_5"},
            "does not build its linear attention yet; backend `torch` does",
        ),
        ({"model_type": "llama"}, "the families are qwen3, qwen3_moe"),
        ({"attention_bias": True}, "biases in attention"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary positions of type 'yarn'"),
        ({"mlp_only_layers": [0]}, "dense layers among those with experts"),
    ],
)
def test_model_with_other_parts_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        sizes_of(QWEN3_4B | changes)


@pytest.mark.parametrize(
    ("settings", "topology", "says"),
    [
        (QWEN3_4B, {"tensor": 16}, "tensor_parallel = 16 must divide the model's key-value heads"),
        (QWEN3_4B, {"pipeline": 8}, "pipeline_parallel = 8 must divide the model's layers"),
        (
            QWEN3_4B,
            {"pipeline": 2, "chunks": 4},
            r"pipeline_parallel \(2\) \* trainer.pipeline_chunks \(4\) = 8 must divide the model's",
        ),
        (QWEN3_4B, {"expert": 2}, "expert_parallel = 2 must divide the model's experts"),
        (
            {
                "model_type": "qwen3_vl",
                "text_config": QWEN3_4B,
                "vision_config": {"deepstack_visual_indexes": [5, 11, 17]},
            },
            {"pipeline": 4, "chunks": 9},
            "must hold the 3 decoder layers .* leaves it 1 of 36",
        ),
    ],
)
def test_topology_that_the_model_does_not_fit_is_refused(settings, topology, says):
    with pytest.raises(ConfigError, match=says):
        sizes_of(settings).require_fits(Topology.of(16, **topology))
