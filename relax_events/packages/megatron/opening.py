"""Opens one rank's part of a model, policy or critic. Imports megatron-core when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.api.errors import ConfigError
from relax_events.api.training import Coordinates, ModelConfig, Ranks, Topology
from relax_events.model_folder import read_model_json
from relax_events.models.causal_lm import open_device
from relax_events.models.families import Family
from relax_events.packages.megatron.cpu import cuda_calls_on_cpu
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.packages.megatron.towers import Towers, build_towers, read_tower_shapes
from relax_events.training.backend.determinism import make_deterministic

if TYPE_CHECKING:
    from relax_events.packages.megatron.stage import ModelStage, Work
    from relax_events.training.batch.packing import PackedBatch


def open_rank_device(name: str, *, ranks: Ranks, threads: int) -> torch.device:
    """Return this rank's device, set up for the same bits in every run.

    Raises:
        ConfigError: `model.device` names the CPU where there is a GPU, which megatron-core uses
            without being asked.
    """
    device = open_device(name, local_rank=ranks.local_rank)
    if device.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "trainer.backend = 'megatron' trains on the GPU where there is one, and model.device "
            "is 'cpu'; set model.device = 'auto', or hide the GPUs (CUDA_VISIBLE_DEVICES='')"
        )
    make_deterministic(device, threads=threads)
    return device


def read_sizes(path: Path, topology: Topology, family: Family) -> DecoderSizes:
    """Read the sizes of a model that is trained.

    Args:
        path: Its folder.
        topology: All ranks.
        family: Of the model.
    Raises:
        ConfigError: megatron-core lacks a part of it, or it can't be divided so.
    """
    sizes = DecoderSizes.from_settings(read_model_json(path / "config.json"), path=path)
    sizes.require_fits(topology)
    return replace(sizes, towers=read_tower_shapes(path, family))


def build_own_towers(
    model: ModelConfig,
    path: Path,
    family: Family,
    at: Coordinates,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Towers | None:
    """Return the towers that a rank holds, without values: ranks of the first pipeline stage hold
    all.
    """
    if at.pipeline:
        return None
    return build_towers(path, family, dtype=dtype, device=device, attention=model.attention)


@contextmanager
def needs_megatron() -> Iterator[None]:
    """Say what to install where an import in this context lacks megatron-core.

    Raises:
        ConfigError: It is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise ConfigError(
            "trainer.backend = 'megatron' needs megatron-core, which is not installed; install "
            "relax-events[megatron]"
        ) from error


def start_ranks(ranks: Ranks, *, seed: int, timeout_seconds: float) -> None:
    """Create the process groups of the ranks' topology; collective.

    Args:
        ranks: This process and its peers.
        seed: Of megatron-core's generators.
        timeout_seconds: Deadline of collectives.
    """
    from relax_events.packages.megatron.building import start_model_parallel

    start_model_parallel(ranks.topology, seed=seed, timeout_seconds=timeout_seconds)


@contextmanager
def guard_passes(ranks: Ranks, what: str) -> Iterator[None]:
    """Raise RankLost where a collective of megatron-core's passes fails; see `Ranks.guard`."""
    with ranks.guard(what), cuda_calls_on_cpu():
        yield


def exchanges_experts(topology: Topology) -> bool:
    """Return whether data-parallel ranks exchange tokens in the experts of each layer."""
    return topology.expert * topology.expert_tensor > 1


def pad_works(works: Sequence[Work], ranks: Ranks) -> list[Work]:
    """Add rows of padding where data-parallel ranks wait for each other; collective there."""
    from relax_events.packages.megatron.stage import Work

    most = len(works)
    if exchanges_experts(ranks.topology):
        most = int(ranks.all_gather(np.array([most])).max())
    padding = [Work(None, lambda result: result)] * (most - len(works))
    return [*works, *padding]


def compute_outputs(
    model: ModelStage,
    batches: Sequence[PackedBatch],
    ranks: Ranks,
    *,
    read: Callable[[Any], Tensor],
    on_done: Callable[[], None] = lambda: None,
) -> list[NDArray[np.floating]]:
    """Run micro-batches forward; return a number for each loss token, zeros where another pipeline
    stage has them. Collective over the ranks that hold the model.

    Args:
        model: This rank's part.
        batches: The same on all ranks that hold the model together.
        ranks: This process and its peers.
        read: Returns the numbers among what the last stage computes.
        on_done: Called after each forward pass of a chunk.
    """
    from relax_events.packages.megatron.stage import Work

    outputs: list[NDArray[np.floating]] = [
        np.zeros(len(batch.targets), np.float32) for batch in batches
    ]

    def keeping(index: int) -> Work:
        def keep(result: Any) -> Tensor:
            values = read(result)
            outputs[index] = values.cpu().numpy()
            return values.sum()

        return Work(batches[index], keep)

    works = pad_works([keeping(index) for index in range(len(batches))], ranks)
    model.run(works, forward_only=True, on_done=on_done)
    return outputs
