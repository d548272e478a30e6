"""Opens one rank's part of a model, policy or critic. Imports megatron-core when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from relax_events.api.errors import ConfigError
from relax_events.api.training import Coordinates, ModelConfig, Ranks, Topology
from relax_events.model_folder import read_model_json
from relax_events.models.causal_lm import open_device
from relax_events.models.families import Family
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.packages.megatron.towers import Towers, build_towers, read_tower_shapes
from relax_events.training.backend.determinism import make_deterministic


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
