"""A rank of a sharded model reads its own rows of the folder: the same bits as whole weights cut
afterwards, in a quarter of their memory on four ranks. The ranks' group is torch's fake one, since
loading exchanges nothing.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from relax_events.config import LoRAConfig, MediaConfig, ModelConfig
from relax_events.models.adapters import Adapters
from relax_events.models.causal_lm import build_causal_lm, load_causal_lm
from relax_events.models.families import Family, read_family
from relax_events.models.folder_weights import view_piece
from relax_events.packages.examples.tiny_models import FAMILY_SETTINGS, make_tiny
from relax_events.training.backend.sharded_parameters import shard_model
from relax_events.training.backend.value_model import ValueNetwork
from tests.component.test_missing_tensors import EMBEDDING, HEAD, rewrite

CPU = torch.device("cpu")
RANKS = [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)]
MODELS = [*sorted(FAMILY_SETTINGS), "tied", "tied_twice", "fused"]
MakeFolder = Callable[[str], Path]


@contextmanager
def rank_of(rank: int, num_ranks: int) -> Iterator[None]:
    """Be one rank of a group whose others are not there."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Return a maker of folders: of a family, with tied embeddings, or with fused experts whose
    last two dimensions are exchanged, as Qwen3-VL publishes them.
    """

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "model"
        if name in FAMILY_SETTINGS:
            return make_tiny(folder, corpus=["12=21"], family=name, hidden_size=32)
        if name == "fused":
            source = make("qwen3_vl_moe")
            weights = load_file(source / "model.safetensors")
            changed = {
                key: tensor.transpose(1, 2).contiguous()
                for key, tensor in weights.items()
                if ".experts." in key
            }
            assert changed
            return rewrite(source, folder, changed=changed)
        source, tied = make("qwen3"), {"tie_word_embeddings": True}
        if name == "tied":
            return rewrite(source, folder, without=[HEAD], settings=tied)
        same = load_file(source / "model.safetensors")[EMBEDDING].clone()
        return rewrite(source, folder, changed={HEAD: same}, settings=tied)

    return make


def load_sharded(
    folder: Path,
    *,
    dtype: torch.dtype,
    is_trained: bool = True,
    change: Callable[[PreTrainedModel, Family], Any] = lambda model, _: model,
) -> nn.Module:
    """Build a model without memory, change it, shard it, and let this rank fill its pieces."""
    family = read_family(folder, MediaConfig())
    built, weights = build_causal_lm(folder, attention="sdpa", dtype=dtype, loader=family.loader)
    assert weights is not None
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    built.requires_grad_(is_trained)
    layers: Any = family.language_model(built).layers
    changed = change(built, family)
    module = changed if isinstance(changed, nn.Module) else built
    shard_model(module, layers=layers, device=CPU, weights=weights)
    return module


def load_whole(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    loader = read_family(folder, MediaConfig()).loader
    return load_causal_lm(folder, attention="sdpa", dtype=dtype, device=CPU, loader=loader)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_have_the_bits_of_the_whole_weights(
    name: str, dtype: torch.dtype, folder_of: MakeFolder
) -> None:
    whole = load_whole(folder_of(name), dtype=dtype)
    expected, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    for rank, num_ranks in RANKS:
        with rank_of(rank, num_ranks):
            sharded = load_sharded(folder_of(name), dtype=dtype)
            parameters = dict(sharded.named_parameters())
            assert parameters.keys() == expected.keys()
            for key, parameter in parameters.items():
                assert isinstance(parameter, DTensor), key
                assert parameter.shape == expected[key].shape
                piece, first = view_piece(parameter)
                rows = -(-len(expected[key]) // num_ranks)
                cut = expected[key].detach()[rank * rows : (rank + 1) * rows]
                assert first == min(rank * rows, len(expected[key]))
                assert piece.dtype == torch.float32
                assert torch.equal(piece, cut.float()), (key, rank, num_ranks)
            computed = dict(sharded.named_buffers())
            assert computed.keys() == buffers.keys()
            for key, buffer in computed.items():
                assert buffer.dtype == buffers[key].dtype
                assert torch.equal(buffer, buffers[key]), key


@pytest.mark.parametrize("rank", range(4))
def test_adapters_begin_with_the_same_values_on_all_ranks(rank: int, folder_of: MakeFolder) -> None:
    path = folder_of("qwen3")
    config = ModelConfig(path=path, lora=LoRAConfig(rank=3))

    def add(model: PreTrainedModel, family: Family) -> Adapters | None:
        return Adapters.for_model(model, config, family=family, path=path)

    whole = load_whole(path, dtype=torch.bfloat16)
    alone = add(whole, read_family(path, MediaConfig()))
    assert alone is not None
    alone.initialise(seed=5)
    expected = dict(whole.named_parameters())
    with rank_of(rank, 4):
        added: list[Adapters | None] = []
        module = load_sharded(
            path, dtype=torch.bfloat16, change=lambda *args: added.append(add(*args))
        )
        assert added[0] is not None
        added[0].initialise(seed=5)
        for key, parameter in module.named_parameters():
            piece, first = view_piece(parameter)
            cut = expected[key].detach()[first : first + len(piece)]
            assert torch.equal(piece, cut.to(piece.dtype)), key
            is_adapter = ".lora_" in key
            assert piece.dtype == (torch.float32 if is_adapter else torch.bfloat16)


def test_a_value_network_has_its_backbone_and_a_head_of_zeros(folder_of: MakeFolder) -> None:
    path = folder_of("qwen3_moe")
    expected = dict(load_whole(path, dtype=torch.float32).base_model.named_parameters())

    def wrap(model: PreTrainedModel, family: Family) -> nn.Module:
        return ValueNetwork(family.remove_head(model), family=family, hidden_size=32)

    with rank_of(1, 4):
        module = load_sharded(path, dtype=torch.float32, change=wrap)
        for key, parameter in module.named_parameters():
            piece, first = view_piece(parameter)
            if key in ("weight", "bias"):
                assert not piece.any()
                continue
            whole = expected.pop(key.removeprefix("backbone."))
            assert torch.equal(piece, whole.detach()[first : first + len(piece)]), key
    assert not expected


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, folder_of: MakeFolder) -> Path:
    """Return a mixture of experts of about 200 MB in bfloat16, its experts stored one by one."""
    folder = tmp_path_factory.mktemp("large")
    config = AutoConfig.from_pretrained(folder_of("qwen3_moe"))
    config.update(
        {
            "hidden_size": 512,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 16,
            "moe_intermediate_size": 256,
            "dtype": "bfloat16",
        }
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def allocation_peak(run: Callable[[], object], trace: Path) -> int:
    """Return the most bytes that torch had allocated on the CPU while a function ran; mapped files
    are none of them.
    """
    gc.collect()  # what is freed meanwhile would count as less
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    profiler.export_chrome_trace(str(trace))
    events = [
        event["args"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    ]
    del kept
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return int(max(event["Total Allocated"] for event in events) - before)


@pytest.mark.parametrize(("is_trained", "item_bytes"), [(False, 2), (True, 4)])
def test_a_rank_of_four_takes_a_third_of_the_weights_at_most(
    is_trained: bool, item_bytes: int, large: Path, tmp_path: Path
) -> None:
    """Of the weights as they are kept: trained ones in float32."""
    stored = (large / "model.safetensors").stat().st_size
    size = stored // 2 * item_bytes
    with rank_of(1, 4):
        peak = allocation_peak(
            lambda: load_sharded(large, dtype=torch.bfloat16, is_trained=is_trained),
            tmp_path / "trace.json",
        )
        whole = allocation_peak(
            lambda: load_whole(large, dtype=torch.bfloat16), tmp_path / "whole.json"
        )
    assert 0.25 * size <= peak <= 0.35 * size
    assert whole > 0.7 * stored, "the measure sees what is loaded whole"
