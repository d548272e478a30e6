"""Runs the passes of micro-batches through the ranks that hold a model together, the policy's or
the critic's: forward and backward, or forward alone. Imports megatron-core when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.api.training import Ranks, Topology
from relax_events.packages.megatron.cpu import cuda_calls_on_cpu
from relax_events.training.backend.step_training import (
    Batch,
    LostBatch,
    ModelPass,
    Outputs,
    join_outputs,
    list_passes,
    multiply_gradients,
)

if TYPE_CHECKING:
    from relax_events.packages.megatron.stage import LossFunction, ModelStage, Work
    from relax_events.training.batch.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class StageCalls(Generic[Batch]):
    """What training needs of a rank's part of a model.

    Attributes:
        build_work: Returns the work of a pass, whose loss is the given one.
        compute_loss: Returns the loss of a micro-batch from the outputs of all of its passes, and
            what records it once they ran.
        report_progress: Called after each forward pass of a chunk.
    """

    build_work: Callable[[ModelPass[Batch], LossFunction], Work]
    compute_loss: Callable[[Batch, Outputs], tuple[Tensor, Callable[[], None]]]
    report_progress: Callable[[], None]


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
    padding = [Work(None, lambda outputs: outputs[0])] * (most - len(works))
    return [*works, *padding]


def train_passes(
    model: ModelStage, batches: Sequence[Batch], ranks: Ranks, calls: StageCalls[Batch]
) -> list[ModelPass[Batch]]:
    """Run micro-batches forward and backward, and return their passes. One that has parts runs
    forward without gradient first, part by part; its loss is computed from all of them, and then
    each part runs again, with gradient. Collective over the ranks that hold the model.

    Args:
        model: This rank's part.
        batches: The same on all ranks that hold the model together.
        ranks: This process and its peers.
        calls: Of the model.
    """
    lost = _differentiate(model, [one for one in batches if one.batch.parts], ranks, calls)

    def build_work(one: ModelPass[Batch]) -> Work:
        def compute_loss(outputs: Outputs) -> Tensor:
            if (whole := lost.get(id(one.whole))) is None:
                loss, record = calls.compute_loss(one.whole, outputs)
            else:
                loss, record = multiply_gradients(outputs, whole[0], one.tokens), whole[1]
            if one.is_last:
                record()
            return loss

        return calls.build_work(one, compute_loss)

    passes = list(list_passes(batches))
    works = pad_works([build_work(one) for one in passes], ranks)
    model.run(works, on_done=calls.report_progress)
    return passes


def _differentiate(
    model: ModelStage, batches: Sequence[Batch], ranks: Ranks, calls: StageCalls[Batch]
) -> dict[int, LostBatch]:
    """Return the outputs of micro-batches of several passes, whose losses have run backward to
    them, and what records each, by identity; nothing where another pipeline stage has them.
    """
    outputs: dict[int, list[Outputs]] = {}

    def build_work(one: ModelPass[Batch]) -> Work:
        def keep(results: Outputs) -> Tensor:
            outputs.setdefault(id(one.whole), []).append(results)
            return results[0].sum()

        return calls.build_work(one, keep)._replace(path_weights=None)  # nothing is balanced

    works = pad_works([build_work(one) for one in list_passes(batches)], ranks)
    model.run(works, forward_only=True, on_done=calls.report_progress)
    lost: dict[int, LostBatch] = {}
    for one in batches:
        if results := outputs.get(id(one)):
            leaves = join_outputs(results)
            with torch.enable_grad():
                loss, record = calls.compute_loss(one, leaves)
                loss.backward()
            lost[id(one)] = leaves, record
    return lost


def compute_outputs(
    model: ModelStage,
    batches: Sequence[PackedBatch],
    ranks: Ranks,
    *,
    on_done: Callable[[], None] = lambda: None,
) -> list[NDArray[np.floating]]:
    """Run micro-batches forward; return the first of their outputs, a number for each loss token,
    zeros where another pipeline stage has them. Collective over the ranks that hold the model.

    Args:
        model: This rank's part.
        batches: The same on all ranks that hold the model together.
        ranks: This process and its peers.
        on_done: Called after each forward pass of a chunk.
    """
    from relax_events.packages.megatron.stage import Work

    outputs: list[NDArray[np.floating]] = [
        np.zeros(len(batch.targets), np.float32) for batch in batches
    ]

    def keeping(index: int) -> Work:
        def keep(results: Outputs) -> Tensor:
            values = results[0]
            outputs[index] = values.cpu().numpy()
            return values.sum()

        return Work(batches[index], keep)

    works = pad_works([keeping(index) for index in range(len(batches))], ranks)
    model.run(works, forward_only=True, on_done=on_done)
    return outputs
