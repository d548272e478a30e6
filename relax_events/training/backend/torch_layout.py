"""How backend `torch` lays a model out over ranks, the policy's and the critic's alike: whole on
each, or sharded over all of them (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.errors import ConfigError
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.recomputation import recompute_layers
from relax_events.training.backend.sharded_parameters import ShardedParameters, shard_model
from relax_events.training.ranks import Ranks

Batch = TypeVar("Batch")


class TorchLayout:
    """See the module's docstring. Collective where the model is sharded."""

    def __init__(
        self, trainer: TrainerConfig, *, ranks: Ranks, device: torch.device, is_sharded: bool
    ) -> None:
        self._trainer, self._ranks, self._device = trainer, ranks, device
        self.is_sharded = is_sharded

    def prepare(self, module: nn.Module, layers: object, *, path: Path) -> None:
        """Set what a loaded model recomputes, and shard it.

        Args:
            module: The whole model.
            layers: Its decoder layers.
            path: Its folder.
        Raises:
            ConfigError: The model has no list of layers, and needs one.
        """
        recomputed = self._trainer.activation_checkpointing
        if recomputed == "none" and not self.is_sharded:
            return
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                f"trainer.sharding and trainer.activation_checkpointing need a list of decoder "
                f"layers, and the model in {path} has none; set both to 'none'"
            )
        recompute_layers(layers, recomputed)
        if self.is_sharded:
            with self._ranks.guard("sharding the model"):
                shard_model(module, layers=layers, device=self._device)

    def open_parameters(self, module: nn.Module) -> FlatParameters | ShardedParameters:
        """Return the store of the parameters of a prepared model."""
        if self.is_sharded:
            return ShardedParameters(module, config=self._trainer, ranks=self._ranks)
        return FlatParameters(module, config=self._trainer)

    def run_together(
        self,
        batches: Iterable[Batch],
        *,
        run_idle: Callable[[], Tensor],
        report_progress: Callable[[], None],
    ) -> Iterator[Batch]:
        """Yield micro-batches whose forward passes the caller runs. Where these are collective, run
        empty ones as often as other ranks have more.

        Args:
            batches: Of this rank, in order.
            run_idle: Runs an empty one forward.
            report_progress: Called after each empty one.
        """
        if not self.is_sharded:
            yield from batches
            return
        mine = list(batches)
        most = int(self._ranks.all_gather(np.array([len(mine)])).max())
        yield from mine
        for _ in range(most - len(mine)):
            output = run_idle()
            if torch.is_grad_enabled():
                output.backward()
            report_progress()
