"""The program of each rank in test_megatron: trains a model that the ranks hold together in a layout.
Rank 0 writes the results, and trains alone by backend `torch` for comparison."""

import sys
import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations import moe
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeTopKRouter,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRMSNorm,
    Qwen3OmniMoeThinkerTextTopKRouter,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeTextRMSNorm,
    Qwen3VLMoeTextTopKRouter,
)

from relax_events.config import LoRAConfig, RunConfig
from relax_events.config.topology import Topology
from relax_events.events.parts import SampleKey
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.objects import ObjectStore
from relax_events.packages.megatron.backend import MegatronBackend
from relax_events.packages.megatron.critic import MegatronCritic
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.distributed import TorchRanks
from relax_events.training.ranks import Ranks, SingleRank
from tests.float64_experts import grouped_product
from tests.integration.megatron_media import media_samples, reads_media, with_media
from tests.unit.trainer_samples import make_samples, run_config

TIMEOUT_SECONDS = 120.0
NORMS = (
    Qwen3RMSNorm,
    Qwen3MoeRMSNorm,
    Qwen3VLTextRMSNorm,
    Qwen3VLMoeTextRMSNorm,
    Qwen3OmniMoeThinkerTextRMSNorm,
)
ROUTERS = (Qwen3MoeTopKRouter, Qwen3VLMoeTextTopKRouter, Qwen3OmniMoeThinkerTextTopKRouter)
WHOLE_STEP = {
    "name": "reinforce_plus_plus_baseline",
    "m2_threshold": 0.05,
    "old_logprobs": "trainer",
    "entropy_coefficient": 0.01,
}
BALANCED = {"load_balancing_coefficient": 0.2}


@dataclass(frozen=True)
class Scenario:
    """A layout, and what is trained in it."""

    family: str
    layout: dict[str, int]
    trainer: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    replays_routing: bool = False
    lora: dict[str, Any] | None = None
    frozen: tuple[str, ...] = ()
    unrewarded: tuple[int, ...] = ()
    """Samples of each step that have no reward, and so no part in it."""


SMALL_PASSES = {"max_tokens_per_micro_batch": 24}
"""Of micro-batches of two to four samples of up to 20 tokens."""
SHORT = {
    "tensor": Scenario("qwen3", {"tensor": 2}),
    "passes_stages": Scenario("qwen3", {"pipeline": 2}, SMALL_PASSES, WHOLE_STEP),
    "replayed": Scenario("qwen3_moe", {"tensor": 2}, replays_routing=True),
}
LONG = {
    "data": Scenario("qwen3", {}, {"offload_optimizer": True}),
    "pipeline": Scenario("qwen3", {"pipeline": 2}, {"offload_optimizer": True}),
    "context": Scenario("qwen3", {"context": 2}),
    "recomputed": Scenario("qwen3", {"tensor": 2}, {"activation_checkpointing": "whole"}),
    "whole_step": Scenario("qwen3", {"tensor": 2}, {}, WHOLE_STEP),
    "whole_step_stages": Scenario("qwen3", {"pipeline": 2}, {}, WHOLE_STEP),
    "mini_batches": Scenario(
        "qwen3", {"context": 2}, {"num_epochs": 2, "num_mini_batches": 2}, WHOLE_STEP
    ),
    "tied": Scenario("tied", {"tensor": 2}),
    "tied_stages": Scenario("tied", {"pipeline": 2}),
    "chunks": Scenario(
        "deep", {"pipeline": 2, "chunks": 2}, {"activation_checkpointing": "whole"}, WHOLE_STEP
    ),
    "adapters": Scenario(
        "qwen3", {"tensor": 2}, {"activation_checkpointing": "whole"}, lora={"rank": 4}
    ),
    "adapters_pipeline": Scenario(
        "deep", {"pipeline": 2, "chunks": 2}, lora={"target_modules": ("k_proj", "up_proj")}
    ),
    "adapters_context": Scenario("qwen3_moe", {"context": 2, "expert": 2}, lora={"rank": 4}),
    "unrewarded": Scenario("qwen3", {"tensor": 2}, unrewarded=(2, 3, 6)),
    "experts": Scenario("qwen3_moe", {"expert": 2}),
    "experts_divided": Scenario("qwen3_moe", {"expert_tensor": 2}),
    "experts_data": Scenario("qwen3_moe", {}),
    "experts_tensor": Scenario("qwen3_moe", {"tensor": 2}),
    "experts_pipeline": Scenario("qwen3_moe", {"pipeline": 2}),
    "experts_context": Scenario("qwen3_moe", {"context": 2, "expert": 2}),
    "replayed_pipeline": Scenario("qwen3_moe", {"pipeline": 2}, replays_routing=True),
    "replayed_recomputed": Scenario(
        "qwen3_moe", {"tensor": 2}, {"activation_checkpointing": "whole"}, replays_routing=True
    ),
    "replayed_recomputed_stages": Scenario(
        "qwen3_moe", {"pipeline": 2}, {"activation_checkpointing": "whole"}, replays_routing=True
    ),
    "balanced_data": Scenario("qwen3_moe", {"expert": 2}, algorithm=BALANCED),
    "balanced_tensor": Scenario("qwen3_moe", {"tensor": 2}, algorithm=BALANCED),
    "balanced_pipeline": Scenario("qwen3_moe", {"pipeline": 2}, algorithm=BALANCED),
    "balanced_chunks": Scenario(
        "deep_moe", {"pipeline": 2, "chunks": 2}, algorithm=BALANCED, replays_routing=True
    ),
    "balanced_context": Scenario(
        "qwen3_moe",
        {"context": 2, "expert": 2},
        {"activation_checkpointing": "whole"},
        BALANCED | {"aggregation": "sample_mean"},
    ),
    "balanced_replayed": Scenario(
        "qwen3_moe",
        {"pipeline": 2},
        {"activation_checkpointing": "whole"},
        BALANCED,
        replays_routing=True,
    ),
    "vision": Scenario("qwen3_vl", {"tensor": 2}, {"activation_checkpointing": "whole"}),
    "vision_context": Scenario("qwen3_vl", {"context": 2}, frozen=("vision",)),
    "vision_stages": Scenario(
        "deep_vl", {"pipeline": 2}, {"activation_checkpointing": "whole"}, WHOLE_STEP
    ),
    "vision_adapters": Scenario(
        "qwen3_vl", {"tensor": 2}, {"activation_checkpointing": "whole"}, lora={"rank": 4}
    ),
    "vision_experts": Scenario("qwen3_vl_moe", {"tensor": 2, "expert": 2}, replays_routing=True),
    "omni": Scenario(
        "qwen3_omni_moe_thinker", {"tensor": 2}, {"activation_checkpointing": "whole"}
    ),
    "passes_tensor": Scenario(
        "qwen3", {"tensor": 2}, SMALL_PASSES | {"activation_checkpointing": "whole"}
    ),
    "passes_context": Scenario("qwen3", {"context": 2}, SMALL_PASSES),
    "passes_chunks": Scenario("deep", {"pipeline": 2, "chunks": 2}, SMALL_PASSES, WHOLE_STEP),
    "passes_replayed": Scenario("qwen3_moe", {"pipeline": 2}, SMALL_PASSES, replays_routing=True),
    "passes_vision": Scenario("qwen3_vl", {"tensor": 2}, SMALL_PASSES),
    "balanced_passes": Scenario("qwen3_moe", {"expert": 2}, SMALL_PASSES, BALANCED),
    "balanced_passes_stages": Scenario("qwen3_moe", {"pipeline": 2}, SMALL_PASSES, BALANCED),
    "replayed_context": Scenario("qwen3_moe", {"context": 2, "expert": 2}, replays_routing=True),
}
FOUR = {
    "tensor_data": Scenario("qwen3", {"tensor": 2}, num_ranks=4),
    "tensor_pipeline": Scenario("tied", {"tensor": 2, "pipeline": 2}, num_ranks=4),
    "tensor_context": Scenario("qwen3", {"tensor": 2, "context": 2}, num_ranks=4),
    "pipeline_data": Scenario("qwen3", {"pipeline": 2}, num_ranks=4),
    "experts_and_tensor": Scenario("qwen3_moe", {"tensor": 2, "expert": 2}, num_ranks=4),
    "experts_divided_twice": Scenario(
        "qwen3_moe", {"tensor": 2, "expert": 2, "expert_tensor": 2}, num_ranks=4
    ),
}
ROUNDED = ("tensor", "data", "experts")
"""Layouts that are also trained in bfloat16."""
SCENARIOS = SHORT | LONG | FOUR


def train(
    backend: TrainerBackend,
    config: RunConfig,
    *,
    unrewarded: tuple[int, ...] = (),
    data: int = 0,
    num_data: int = 1,
) -> list[Any]:
    """Train a step of which this data-parallel rank has its share; return its metrics."""
    step = backend.policy_version
    samples = samples_of(config, step, backend.experts)
    for index in unrewarded:
        samples[index] = replace(samples[index], reward=None)
    groups = [samples[first : first + 2] for first in range(0, 10, 2)]
    mine = [sample for group in groups[data::num_data] for sample in group]
    size = 2 + 2 * data  # ranks with other numbers of micro-batches
    for first in range(0, len(mine), size):
        backend.accumulate(mine[first : first + size])
    leave(backend)
    metrics = backend.step().to_metrics()
    leave(backend)
    return [metrics]


def leave(backend: TrainerBackend) -> None:
    """Let the memory of a model that ranks hold together leave the device, and come back."""
    if isinstance(backend, MegatronBackend):
        assert backend.move_away() > 0
        backend.bring_back()


def train_rounded(config: RunConfig, ranks: Ranks, at: dict[str, Any]) -> list[bool]:
    """Train two steps in bfloat16, with and without all memory overwritten between them; return
    for each tensor whether the weights are the same."""
    found = []
    for stays in (True, False):
        backend = MegatronBackend(config, ranks=ranks, dtype=torch.bfloat16)
        train(backend, config, **at)
        if not stays:
            kept, rebuilt = backend._parameters.memory()
            backend.move_away()
            with torch.no_grad():
                for tensor in (*kept, *rebuilt):
                    tensor.fill_(7.0)
            backend.bring_back()
        train(backend, config, **at)
        found.append(collect_weights(backend))
    return [torch.equal(found[0][name], tensor) for name, tensor in found[1].items()]


def samples_of(config: RunConfig, step: int, experts: ExpertShape | None) -> list[SampleReady]:
    """Return a step's samples, the same for the reference; with random experts, where
    their routing is replayed. In half of the prompt groups both differ by their last token alone."""
    samples = list(
        media_samples(config, 10, seed=step)
        if reads_media(config.model.path)
        else text_samples(config.model.path, step)
    )
    if experts is not None:
        draw = np.random.default_rng(step)
        samples = [
            replace(sample, routed_experts=draw_experts(draw, len(sample.tokens) - 1, experts))
            for sample in samples
        ]
    for index in (1, 5, 9):
        samples[index] = branch_off(samples[index - 1], key=samples[index].key)
    return samples


def branch_off(sample: SampleReady, *, key: SampleKey) -> SampleReady:
    """Return a sample with another last token and advantage."""
    tokens = np.asarray(sample.tokens).copy()
    tokens[-1] = (tokens[-1] + 1) % 256
    return replace(sample, key=key, tokens=tokens, advantages=-0.5 * np.asarray(sample.advantages))


@cache
def text_samples(folder: Path, step: int) -> list[SampleReady]:
    with Float64Reference():
        return make_samples(10, seed=step, model_path=folder)


def draw_experts(draw: np.random.Generator, num_tokens: int, shape: ExpertShape) -> Any:
    """Draw different experts for each token and layer."""
    ranks = draw.random((num_tokens, shape.num_layers, shape.num_experts)).argsort(-1)
    return ranks[..., : shape.top_k].astype(shape.dtype)


def run(name: str, folder: Path, ranks: TorchRanks) -> dict[str, Any]:
    """Train two steps in a layout, save the state after each, and load the first one again."""
    scenario = SCENARIOS[name]
    model = folder / scenario.family
    lay_out(ranks, scenario.layout)
    config = run_config(
        model, trainer={"max_grad_norm": 0.5} | scenario.trainer, algorithm=scenario.algorithm
    )
    if scenario.replays_routing:
        replaying = config.model.model_copy(update={"routing_replay": "rollout"})
        config = config.model_copy(update={"model": replaying})
    if scenario.lora is not None:
        adapted = config.model.model_copy(update={"lora": LoRAConfig(**scenario.lora)})
        config = config.model_copy(update={"model": adapted})
    if scenario.frozen:
        partly = config.model.model_copy(update={"frozen": scenario.frozen})
        config = config.model_copy(update={"model": partly})
    if reads_media(model):
        config = with_media(config, folder / "media")
    kept = config.trainer.model_copy(
        update={
            "activation_checkpointing": "none",
            "offload_optimizer": False,
            "share_prompts": False,
            "max_tokens_per_micro_batch": 10_000,
        }
    )
    plain = config.model_copy(update={"trainer": kept})  # for the reference
    results: dict[str, Any] = {}
    store = ObjectStore.open((folder / "objects").as_uri())
    chosen: dict[str, Any] = {"unrewarded": scenario.unrewarded}
    at = chosen | {"data": ranks.at.data, "num_data": ranks.topology.data}
    if name in ROUNDED:
        results["rounded"] = train_rounded(config, ranks, at)
    backend = MegatronBackend(config, ranks=ranks, dtype=torch.float64)
    if (sharing := backend._model.prefix_sharing) is not None:
        backend._model.prefix_sharing = replace(sharing, min_tokens=2)
    cells = record_cells(backend)
    with Checkpoints(store, ranks=ranks, keep=9, folder=f"{name}/") as checkpoints:
        results["metrics"] = train(backend, config, **at)
        results["cells"] = list(cells)
        first = checkpoints.save(backend.state(), extra={}).wait(60)
        results["first"] = state_of(checkpoints, first)
        results["metrics"] += train(backend, config, **at)
        results["weights"] = collect_weights(backend)
        backend.load_state(checkpoints.load(first).state)
        results["metrics_again"] = train(backend, config, **at)
        results["weights_again"] = collect_weights(backend)
        if ranks.rank == 0:
            with Float64Reference():
                alone = TorchBackend(plain, ranks=SingleRank(), dtype=torch.float64)
                expected = {"metrics": train(alone, config, **chosen)}
                expected["first"] = {
                    key: value.clone() for key, value in alone.state().tensors.items()
                }
                expected["metrics"] += train(alone, config, **chosen)
                expected["weights"] = collect_weights(alone)
                alone.load_state(checkpoints.load(first).state)
                expected["metrics_again"] = train(alone, config, **chosen)
                expected["weights_again"] = collect_weights(alone)
            results["expected"] = expected
    with Checkpoints(
        store, ranks=SingleRank(), keep=9, folder=f"{name}-alone-{ranks.rank}/"
    ) as alone_checkpoints:
        # what one rank of backend `torch` wrote is loaded in pieces
        with Float64Reference():
            whole = TorchBackend(plain, ranks=SingleRank(), dtype=torch.float64)
        whole.load_state(checkpoints.load(first).state)
        back = alone_checkpoints.save(whole.state(), extra={}).wait(60)
        backend.load_state(alone_checkpoints.load(back).state)
    with Checkpoints(store, ranks=ranks, keep=9, folder=f"{name}-back/") as checkpoints:
        results["back"] = state_of(
            checkpoints, checkpoints.save(backend.state(), extra={}).wait(60)
        )
    return results


def record_cells(backend: MegatronBackend | MegatronCritic) -> list[int]:
    """Return a list that gets the cells of each pass of several paths."""
    cells: list[int] = []
    model: Any = backend._model
    run = model.run

    def run_and_record(works: Any, **settings: Any) -> None:
        batches = [work.batch for work in works if work.batch is not None]
        cells.extend(len(np.unique(one.cells)) for one in batches if len(one.num_path_tokens) > 1)
        run(works, **settings)

    model.run = run_and_record
    return cells


def state_of(checkpoints: Checkpoints, reference: Any) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, without those of generators."""
    tensors = checkpoints.load(reference).state.tensors
    return {name: value.clone() for name, value in tensors.items() if name[:4] != "rng."}


def lay_out(ranks: TorchRanks, sizes: dict[str, int]) -> Ranks:
    """Change the layout of ranks that run."""
    ranks.topology = Topology.of(ranks.size, **sizes)
    ranks.at = ranks.topology.at(ranks.rank)
    ranks._peers = ranks._join_peers(TIMEOUT_SECONDS) if ranks.topology.model > 1 else None
    return ranks


class Float64Reference:
    """Let the reference compute in float64 what transformers computes in float32 whatever the
    dtype: norms and routers; and its experts, which it can't in float64."""

    def __enter__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        for owner, name, replacement in (
            *((norm, "forward", _norm) for norm in NORMS),
            *((router, "forward", _route) for router in ROUTERS),
            (moe, "_grouped_mm", grouped_product),
        ):
            self._originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, replacement)

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)


def _route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    chosen, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):  # Qwen3-VL always does
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen, indices


def _norm(self: Any, hidden: Tensor) -> Tensor:
    squares = hidden.square().mean(-1, keepdim=True)
    return hidden * torch.rsqrt(squares + self.variance_epsilon) * self.weight


def main(folder: Path, names: list[str]) -> None:
    """Run scenarios, each in a layout of its own."""
    results: dict[str, Any] = {}
    with TorchRanks(timeout_seconds=TIMEOUT_SECONDS) as ranks:
        for name in names:
            results[name] = run(name, folder, ranks)
    if ranks.rank == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of what megatron-core finds no GPU package for
    main(Path(sys.argv[1]), sys.argv[2:])
