"""How backend `torch` lays a model out over ranks, the policy's and the critic's alike: whole on
each, or sharded over all of them (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.errors import ConfigError
from relax_events.models.folder_weights import FolderWeights
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.out_of_memory import PassMemory
from relax_events.training.backend.recomputation import Bind, recompute_layers
from relax_events.training.backend.sharded_parameters import ShardedParameters, shard_model
from relax_events.training.backend.step_training import (
    Batch,
    LostBatch,
    ModelPass,
    Outputs,
    join_outputs,
    list_passes,
    multiply_gradients,
)
from relax_events.training.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelCalls(Generic[Batch]):
    """What training needs of a model.

    Attributes:
        run: Runs a pass forward.
        compute_loss: Returns the loss of a micro-batch from the outputs of all of its passes, and
            what records it once they ran backward.
        run_idle: Runs an empty pass forward; see `TorchLayout.run_together`.
        report_progress: Called after each pass.
    """

    run: Callable[[ModelPass[Batch]], Outputs]
    compute_loss: Callable[[Batch, Outputs], tuple[Tensor, Callable[[], None]]]
    run_idle: Callable[[], Tensor]
    report_progress: Callable[[], None]


class TorchLayout:
    """See the module's docstring. Collective where the model is sharded."""

    def __init__(
        self, trainer: TrainerConfig, *, ranks: Ranks, device: torch.device, is_sharded: bool
    ) -> None:
        self._trainer, self._ranks, self._device = trainer, ranks, device
        self.is_sharded = is_sharded
        self.memory = PassMemory()

    def prepare(
        self,
        module: nn.Module,
        layers: object,
        *,
        path: Path,
        weights: FolderWeights | None = None,
        bind: Bind = lambda forward: forward,
    ) -> None:
        """Set what a model recomputes, and shard it.

        Args:
            module: The whole model.
            layers: Its decoder layers.
            path: Its folder.
            weights: Of a model on `meta`, to fill once it is sharded; None of a loaded one.
            bind: See `recompute_layers`.
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
        recompute_layers(layers, recomputed, bind=bind)
        if self.is_sharded:
            with self._ranks.guard("sharding the model"):
                shard_model(module, layers=layers, device=self._device, weights=weights)

    def open_parameters(self, module: nn.Module) -> FlatParameters | ShardedParameters:
        """Return the store of the parameters of a prepared model."""
        if self.is_sharded:
            return ShardedParameters(module, config=self._trainer, ranks=self._ranks)
        return FlatParameters(module, config=self._trainer)

    def train(self, batches: Iterable[Batch], calls: ModelCalls[Batch]) -> None:
        """Run micro-batches forward and backward. One that has parts runs forward without gradient
        first, part by part; its loss is computed from all of them, and then each part runs again,
        with gradient.

        Args:
            batches: Of this rank, in order.
            calls: Of the model.
        """
        for together in [list(batches)] if self.is_sharded else ([one] for one in batches):
            self._train_together(together, calls)

    def _train_together(self, batches: Sequence[Batch], calls: ModelCalls[Batch]) -> None:
        lost = self._differentiate([one for one in batches if one.batch.parts], calls)
        for one in self._run_passes(batches, calls):
            train = partial(self._train_pass, one, calls, lost.get(id(one.whole)))
            record = self.memory.run(one.batch, train, is_trained=True)
            if one.is_last:
                record()
            calls.report_progress()

    @staticmethod
    def _train_pass(
        one: ModelPass[Batch], calls: ModelCalls[Batch], lost: LostBatch | None
    ) -> Callable[[], None]:
        """Run a pass forward and backward; return what records its micro-batch."""
        outputs = calls.run(one)
        if lost is not None:
            multiply_gradients(outputs, lost[0], one.tokens).backward()
            return lost[1]
        loss, record = calls.compute_loss(one.whole, outputs)
        loss.backward()
        return record

    def _differentiate(
        self, batches: Sequence[Batch], calls: ModelCalls[Batch]
    ) -> dict[int, LostBatch]:
        """Return the outputs of micro-batches, whose losses have run backward to them, by identity,
        and what records each.
        """
        lost: dict[int, LostBatch] = {}
        outputs: list[Outputs] = []
        with torch.no_grad():
            for one in self._run_passes(batches, calls):
                outputs.append(self.memory.run(one.batch, partial(calls.run, one)))
                calls.report_progress()
                if one.is_last:
                    with torch.enable_grad():
                        leaves = join_outputs(outputs)
                        loss, record = calls.compute_loss(one.whole, leaves)
                        loss.backward()
                    lost[id(one.whole)] = leaves, record
                    outputs.clear()
        return lost

    def _run_passes(
        self, batches: Sequence[Batch], calls: ModelCalls[Batch]
    ) -> Iterator[ModelPass[Batch]]:
        return self.run_together(
            list_passes(batches), run_idle=calls.run_idle, report_progress=calls.report_progress
        )

    def run_together(
        self,
        batches: Iterable[T],
        *,
        run_idle: Callable[[], Tensor],
        report_progress: Callable[[], None],
    ) -> Iterator[T]:
        """Yield passes that the caller runs forward. Where these are collective, run
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
