"""Routing replay where layers are computed again in the backward pass: the experts of the samples are
replayed there too, whatever the routers would choose.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.ranks import SingleRank
from tests.float64_experts import use_float64_experts
from tests.folders import kept_folder
from tests.small_settings import small_run
from tests.unit.trainer_samples import route_by_tokens
from tests.unit.training.test_prefix_tree import branched_samples
from tests.unit.training.test_router_scores import FAMILIES, model_of

TINY = ("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen3_5_moe")
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "one row": {},
    "rows": {"trainer": {"share_prompts": False}},
    "passes": {"trainer": {"max_tokens_per_micro_batch": 80}},
    "adapters": {"model": {"lora": {"rank": 4}}},
    "balanced": {"algorithm": {"load_balancing_coefficient": 0.3}},
    "rows of passes": {"trainer": {"max_tokens_per_micro_batch": 80, "share_prompts": False}},
}


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64_experts(monkeypatch)


def mixture(family: str) -> Path:
    if family in FAMILIES:
        return model_of(family)
    folder = kept_folder(f"recomputed-{family}")
    return make_tiny(folder, corpus=["12=21"], family=family, hidden_size=32, seed=4)


def open_backend(family: str, mode: str, sections: dict[str, dict[str, Any]]) -> TorchBackend:
    model = {"path": mixture(family), "device": "cpu", "dtype": "float32"}
    config = small_run(
        {
            "run": {"id": "test"},
            "data": {"source": "jsonl:unused"},
            "model": model | {"routing_replay": "rollout"} | sections.get("model", {}),
            "algorithm": sections.get("algorithm", {}),
            "trainer": {"activation_checkpointing": mode} | sections.get("trainer", {}),
        }
    )
    backend = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
    backend._model.prefix_sharing = backend._model.prefix_sharing and PrefixSharing(min_tokens=1)
    return backend


def routed_samples(shape: ExpertShape) -> list[SampleReady]:
    return [route_by_tokens(sample, shape) for sample in branched_samples()]


def find_routers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if hasattr(part, "top_k") and hasattr(part, "weight")]


def train(
    family: str, mode: str, sections: dict[str, dict[str, Any]]
) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]]]:
    """Train one micro-batch; return its gradients, and what each router put out and what it would
    have chosen, pass by pass, computed again or not.
    """
    backend = open_backend(family, mode, sections)
    shape = backend.experts
    assert shape is not None
    routers = find_routers(backend._model.module)
    calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in routers]

    def note(layer: int, router: Any, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        own = output[0].float().topk(router.top_k, dim=-1)[1]
        calls[layer].append((output[2].detach().clone(), own))

    for layer, router in enumerate(routers):
        router.register_forward_hook(partial(note, layer))
    backend.accumulate(routed_samples(shape))
    parameters: Any = backend._parameters
    return parameters.gradients.clone(), calls


@pytest.mark.parametrize("mode", ["whole", "selective"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "one row") for family in (*TINY, *FAMILIES)),
        *(("qwen3_moe", n) for n in SETTINGS),
    ],
)
def test_layers_are_computed_again_through_the_experts_of_the_samples(
    family: str, name: str, mode: str
) -> None:
    kept, forward = train(family, "none", SETTINGS[name])
    again, calls = train(family, mode, SETTINGS[name])
    assert float(torch.linalg.vector_norm(kept)) > 0.01
    assert torch.equal(again, kept)
    for layer, expected in zip(calls, forward, strict=True):
        assert len(layer) > len(expected), "a layer was not computed again"
        for chosen, own in layer:
            assert any(torch.equal(chosen, other) for other, _ in expected)
            assert not torch.equal(chosen.sort()[0], own.sort()[0]), "the router chose alike"


@pytest.mark.parametrize("name", ["one row", "balanced"])
def test_activations_of_one_layer_at_a_time_are_held_in_the_backward_pass(name: str) -> None:
    backend = open_backend("qwen3_moe", "whole", SETTINGS[name])
    shape = backend.experts
    assert shape is not None
    held: list[StorageWeakRef] = []
    most = 0

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal most
        if torch._C._current_graph_task_id() != -1:  # only in a backward pass
            held.append(StorageWeakRef(inputs[0].untyped_storage()))
            most = max(most, sum(not one.expired() for one in held))

    for layer in backend._model.module.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(note)
    backend.accumulate(routed_samples(shape))
    assert len(held) == shape.num_layers
    assert most == 1
    assert all(one.expired() for one in held)
