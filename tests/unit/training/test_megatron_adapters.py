"""The tables between peft's adapters in transformers and those in megatron-core's layers: names and
shapes alone."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from relax_events.config import LoRAConfig
from relax_events.config.topology import Topology
from relax_events.errors import ConfigError
from relax_events.models.adapters import Adapters, published_parameters
from relax_events.packages.megatron.adapter_layout import AdapterLayout
from relax_events.packages.megatron.layout import Box, full_shapes, holds_first_copy
from relax_events.packages.megatron.sizes import DecoderSizes
from tests.unit.training.test_megatron_layout import PUBLISHED

pytestmark = pytest.mark.unit
LORAS = [LoRAConfig(rank=4), LoRAConfig(rank=2, target_modules=("k_proj", "35.self_attn.o_proj"))]
TOPOLOGIES = [
    Topology.of(8, tensor=4, pipeline=2),
    Topology.of(4, tensor=2, pipeline=2, chunks=3),
    Topology.of(4, tensor=2, context=2),
]


def sizes_of(model: str) -> DecoderSizes:
    return DecoderSizes.from_settings(PUBLISHED[model], path="a folder")


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("lora", LORAS, ids=["all", "some"])
def test_names_and_shapes_are_those_of_peft(model: str, lora: LoRAConfig) -> None:
    with torch.device("meta"):
        settings: dict[str, Any] = PUBLISHED[model]
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        Adapters(module, lora, language_model=module.base_model, path=Path("unused"))
    expected = {name: tuple(one.shape) for name, one in published_parameters(module).items()}
    assert full_shapes(sizes_of(model), AdapterLayout(lora)) == expected


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ranks_hold_every_adapter_exactly_once(model: str, topology: Topology) -> None:
    sizes, layout = sizes_of(model), AdapterLayout(LoRAConfig(rank=4))
    layout.require_fits(sizes, topology)
    boxes: dict[str, set[Box]] = defaultdict(set)
    for rank in range(topology.num_ranks):
        at = topology.at(rank)
        for shard in layout(sizes, topology, at):
            (piece,) = shard.pieces
            assert shard.shape == tuple(end - start for start, end in piece.source)
            if holds_first_copy(shard, at):
                assert piece.source not in boxes[piece.name]
                boxes[piece.name].add(piece.source)
    shapes = full_shapes(sizes, layout)
    assert boxes.keys() == shapes.keys()
    for name, shape in shapes.items():
        # disjoint, since each axis is cut at the same places on all ranks
        covered = sum(prod(end - start for start, end in box) for box in boxes[name])
        assert covered == prod(shape)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (
            ("c_proj",),
            "names 'c_proj', but the linear layers that get adapters are down_proj, gate",
        ),
        (("0.self_attn.q_proj",), "leaves pipeline stage 1 of 2 without adapters"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets: tuple[str, ...], says: str) -> None:
    layout = AdapterLayout(LoRAConfig(target_modules=targets))
    with pytest.raises(ConfigError, match=says):
        layout.require_fits(sizes_of("4B"), Topology.of(2, pipeline=2))
