"""Checksums of a server's tensors, predicted from the checkpoint's: those of a CPU, and those of a
GPU, which are compared with SGLang's own kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import tiny_model

from relax_events.engines.sglang import weight_checksums
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.gpu_digest import BLOCK_BYTES, GpuDigest
from relax_events.engines.sglang.weight_checksums import (
    Part,
    TensorRecipe,
    WeightChecksums,
    name_by_rank,
)
from tests.gpu_digests import DIGESTS, Case

ROOT = Path(__file__).parents[2]
Hash = Callable[[], Any]
"""Of a server on a CPU, or on a GPU."""


def hash_whole(new: Hash, *parts: torch.Tensor) -> str:
    """Hash as a server does: the whole tensor's bytes, 16 digits."""
    digest = new()
    digest.update(torch.cat([part.reshape(-1) for part in parts]).numpy().tobytes())
    return str(digest.hexdigest()[:16])


@pytest.mark.parametrize("case", DIGESTS, ids=repr)
def test_digest_on_gpus_is_that_of_the_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is the kernel's: see the next test."""
    tensors = {"a": case.build()}
    recipe = TensorRecipe((Part("a"),), is_on_gpu=True)
    assert recipe.digest(tensors, dtype=case.dtype) == DIGESTS[case]
    monkeypatch.setattr(weight_checksums, "BLOCK_BYTES", 1000)
    assert recipe.digest(tensors, dtype=case.dtype) == DIGESTS[case]


def test_table_of_gpu_digests_is_that_of_the_kernel(sglang_python: str) -> None:
    """SGLang's kernel runs in Triton's interpreter, on the CPU."""
    result = subprocess.run(
        [sglang_python, "-m", "tests.gpu_digests"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    table = json.loads(result.stdout)
    assert table == {repr(case): [digest] * 2 for case, digest in DIGESTS.items()}
    assert len(table) > 20


def test_digest_on_gpus_does_not_depend_on_how_bytes_arrive() -> None:
    random = np.random.default_rng(5)
    data = random.bytes(5 * BLOCK_BYTES + 4321)
    whole = GpuDigest()
    whole.update(data)
    digests = {whole.hexdigest(), whole.hexdigest()}
    for cuts in (
        [BLOCK_BYTES],
        [1, 1, BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 2],
        sorted(random.integers(0, len(data), 9).tolist()),
    ):
        one, places = GpuDigest(), [0, *cuts, len(data)]
        for start, end in pairwise(places):
            one.update(memoryview(data)[start:end])
            one.hexdigest()
        digests.add(one.hexdigest())
    assert len(digests) == 1


def test_digest_on_gpus_changes_with_one_bit_and_with_the_order_of_words() -> None:
    words = np.random.default_rng(6).integers(0, 2**32, 3 * BLOCK_BYTES // 4 + 5, np.uint32)
    variants = [words, words[:-1], words[::-1], np.append(words, np.uint32(0))]
    for place in (0, 8191, 8192, len(words) // 2, len(words) - 1):
        variants.append(words.copy())
        variants[-1][place] ^= 1 << 31
        variants.append(words.copy())
        variants[-1][[place, place - 1]] = words[[place - 1, place]]
    digests = set()
    for variant in variants:
        digest = GpuDigest()
        digest.update(np.ascontiguousarray(variant).data.cast("B"))
        digests.add(digest.hexdigest())
    assert len(digests) == len(variants)


def server_tensors(
    family: str, own: dict[str, torch.Tensor], *, new: Hash = sha256
) -> dict[str, str]:
    """Put a tiny model's tensors together by hand, as SGLang's modules are built, and hash them."""
    checksum = partial(hash_whole, new)
    rows, width = own["model.embed_tokens.weight"].shape
    padding = torch.zeros(-rows % 64, width)
    sums = {
        name: checksum(own[name], padding)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    sums["model.norm.weight"] = checksum(own["model.norm.weight"])
    for layer in ("model.layers.0", "model.layers.1"):
        attention = [own[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        sums[f"{layer}.self_attn.qkv_proj.weight"] = checksum(*attention)
        same = [
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "input_layernorm",
            "post_attention_layernorm",
        ]
        same += ["mlp.gate"] if family == "qwen3_moe" else ["mlp.down_proj"]
        sums |= {f"{layer}.{name}.weight": checksum(own[f"{layer}.{name}.weight"]) for name in same}
        if family == "qwen3_moe":
            experts = [f"{layer}.mlp.experts.{number}" for number in range(8)]
            both = [
                own[f"{expert}.{part}_proj.weight"] for expert in experts for part in ("gate", "up")
            ]
            sums[f"{layer}.mlp.experts.w13_weight"] = checksum(*both)
            sums[f"{layer}.mlp.experts.w2_weight"] = checksum(
                *(own[f"{expert}.down_proj.weight"] for expert in experts)
            )
        else:
            sums[f"{layer}.mlp.gate_up_proj.weight"] = checksum(
                own[f"{layer}.mlp.gate_proj.weight"], own[f"{layer}.mlp.up_proj.weight"]
            )
    return sums


@pytest.mark.parametrize("new", [sha256, GpuDigest])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_server_checksums_of_every_tensor_can_be_predicted(family: str, new: Hash) -> None:
    own, other = (
        ModelFolder.read(tiny_model(family)).tensors(),
        ModelFolder.read(tiny_model(family, seed=9)).tensors(),
    )
    checksums, unverified = WeightChecksums.infer(
        [server_tensors(family, own, new=new)], own, dtype=torch.float32
    )
    assert unverified == []
    assert checksums.compute(other) == server_tensors(family, other, new=new)


def test_tensors_that_a_server_keeps_on_the_cpu_can_be_predicted() -> None:
    """As with `--cpu-offload-gb`: they have another hash than those on the GPU."""
    own, other = (ModelFolder.read(tiny_model(seed=seed)).tensors() for seed in (3, 9))

    def mixed(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        on_cpu = server_tensors("qwen3", tensors)
        return server_tensors("qwen3", tensors, new=GpuDigest) | {
            name: digest for name, digest in on_cpu.items() if ".layers.1." in name
        }

    checksums, unverified = WeightChecksums.infer([mixed(own)], own, dtype=torch.float32)
    assert unverified == []
    assert checksums.compute(other) == mixed(other)


def rank_tensors(
    own: Mapping[str, torch.Tensor], *, rank: int, of: int, new: Hash
) -> dict[str, str]:
    """Return the checksums of a rank of a dense model whose weights several share."""
    checksum = partial(hash_whole, new)

    def rows(name: str, *, parts: int = of) -> torch.Tensor:
        return own[name].chunk(parts)[rank * parts // of]

    def columns(name: str) -> torch.Tensor:
        return own[name].chunk(of, dim=1)[rank].contiguous()

    vocabulary = own["model.embed_tokens.weight"]
    padded = torch.nn.functional.pad(vocabulary, (0, 0, 0, -len(vocabulary) % 64))
    sums = {
        "model.embed_tokens.weight": checksum(padded.chunk(of)[rank]),
        "model.norm.weight": checksum(own["model.norm.weight"]),
    }
    if "lm_head.weight" in own:
        head = own["lm_head.weight"]
        padded = torch.nn.functional.pad(head, (0, 0, 0, -len(head) % 64))
        sums["lm_head.weight"] = checksum(padded.chunk(of)[rank])
    for layer in ("model.layers.0", "model.layers.1"):
        attention = f"{layer}.self_attn"
        # keys and values have two heads: with four ranks each pair of them has the same one
        sums[f"{attention}.qkv_proj.weight"] = checksum(
            rows(f"{attention}.q_proj.weight"),
            *(rows(f"{attention}.{part}_proj.weight", parts=min(of, 2)) for part in "kv"),
        )
        sums[f"{layer}.mlp.gate_up_proj.weight"] = checksum(
            rows(f"{layer}.mlp.gate_proj.weight"), rows(f"{layer}.mlp.up_proj.weight")
        )
        for name in (f"{attention}.o_proj.weight", f"{layer}.mlp.down_proj.weight"):
            sums[name] = checksum(columns(name))
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm",
                     "post_attention_layernorm"):  # fmt: skip
            sums[f"{layer}.{name}.weight"] = checksum(own[f"{layer}.{name}.weight"])
    return sums


@pytest.mark.parametrize("new", [sha256, GpuDigest])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_checksums_of_each_rank_can_be_predicted(num_ranks: int, new: Hash) -> None:
    own, other = (ModelFolder.read(tiny_model(seed=seed)).tensors() for seed in (3, 9))
    ranks = [rank_tensors(own, rank=rank, of=num_ranks, new=new) for rank in range(num_ranks)]
    checksums, unverified = WeightChecksums.infer(ranks, own, dtype=torch.float32)
    assert unverified == []
    expected = [rank_tensors(other, rank=rank, of=num_ranks, new=new) for rank in range(num_ranks)]
    assert checksums.compute(other) == name_by_rank(expected)


def expert_tensors(
    own: Mapping[str, torch.Tensor], *, rank: int, of: int, num_groups: int
) -> dict[str, str]:
    """Return the checksums of a rank's experts: its group, and of each expert its slice."""
    num_slices = of // num_groups
    group = range(8)[rank // num_slices * 8 // num_groups :][: 8 // num_groups]
    sums = {}
    for layer in ("model.layers.0", "model.layers.1"):
        gates_and_ups, downs = [], []
        for number in group:
            gate, up, down = (
                own[f"{layer}.mlp.experts.{number}.{part}_proj.weight"]
                for part in ("gate", "up", "down")
            )
            gates_and_ups += [one.chunk(num_slices)[rank % num_slices] for one in (gate, up)]
            downs.append(down.chunk(num_slices, dim=1)[rank % num_slices])
        sums[f"{layer}.mlp.experts.w13_weight"] = hash_whole(GpuDigest, *gates_and_ups)
        sums[f"{layer}.mlp.experts.w2_weight"] = hash_whole(GpuDigest, *downs)
    return sums


@pytest.mark.parametrize(
    ("num_ranks", "num_groups"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2)]
)
def test_checksums_of_each_ranks_experts_can_be_predicted(num_ranks: int, num_groups: int) -> None:
    own, other = (
        {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        for tensors in (
            ModelFolder.read(tiny_model("qwen3_moe", seed=seed)).tensors() for seed in (3, 9)
        )
    )
    of_own, of_other = (
        [
            expert_tensors(tensors, rank=rank, of=num_ranks, num_groups=num_groups)
            for rank in range(num_ranks)
        ]
        for tensors in (own, other)
    )
    checksums, unverified = WeightChecksums.infer(of_own, own, dtype=torch.float32)
    assert unverified == []
    assert checksums.compute(other) == name_by_rank(of_other)


def test_checksums_of_each_ranks_tower_heads_can_be_predicted() -> None:
    """The checkpoint has the queries, keys and values of all heads in one tensor."""
    shapes = {"weight": (48, 7), "bias": (48,)}

    def build() -> dict[str, torch.Tensor]:
        return {
            f"model.visual.blocks.0.attn.qkv.{name}": torch.randn(shape)
            for name, shape in shapes.items()
        }

    def reported(tensors: dict[str, torch.Tensor]) -> list[dict[str, str]]:
        thirds = {name: tensor.chunk(3) for name, tensor in tensors.items()}
        return [
            {
                name.replace("model.visual", "visual").replace("qkv", "qkv_proj"): hash_whole(
                    GpuDigest, *(third.chunk(4)[rank] for third in parts)
                )
                for name, parts in thirds.items()
            }
            for rank in range(4)
        ]

    own, other = build(), build()
    checksums, unverified = WeightChecksums.infer(reported(own), own, dtype=torch.float32)
    assert unverified == []
    assert checksums.compute(other) == name_by_rank(reported(other))


@pytest.mark.parametrize("new", [sha256, GpuDigest])
def test_tensors_without_a_matching_checksum_stay_unverified(new: Hash) -> None:
    own = ModelFolder.read(tiny_model()).tensors()
    sums = server_tensors("qwen3", own, new=new)
    sums["model.norm.weight"] = "0" * 16
    del sums["model.layers.1.self_attn.qkv_proj.weight"]
    _, unverified = WeightChecksums.infer([sums], own, dtype=torch.float32)
    assert unverified == [
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "kqv"),
        "model.norm.weight",
    ]
