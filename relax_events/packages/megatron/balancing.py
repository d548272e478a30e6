"""Adds the load-balancing loss to megatron-core's routers.

The loss of `models.routers.imbalance`, with the same numbers: each path alone, layer by layer. A
path's tokens may lie on several ranks; these add up how many went to each expert. From then on a
token's share of the loss depends on its own probabilities alone, so its gradient is known in the
forward pass, on the stage that holds the layer, and joins the gradient of the logits in the
backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist

from relax_events.packages.megatron.row import Row

Routing = Callable[..., tuple[Tensor, Tensor]]


class RowPaths(NamedTuple):
    """Whose a rank's tokens of a row are.

    Attributes:
        owners: Path of each token; of padding, the number of paths.
        num_tokens: Of each whole path.
        weights: Of each path in the loss, before the step's normaliser.
    """

    owners: Int[Tensor, " own"]
    num_tokens: Float[Tensor, " paths"]
    weights: Float[Tensor, " paths"]


class _AddGradient(torch.autograd.Function):
    """Passes logits on, and adds a gradient that becomes known after it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, later: list[Tensor]) -> Tensor:
        ctx.later = later
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.later[0], None


class ExpertBalance:
    """The routers of this rank's layers, with the load-balancing loss."""

    def __init__(
        self,
        chunks: Sequence[Iterable[nn.Module]],
        *,
        coefficient: float,
        num_layers: int,
        tensor: Any,
        context: Any,
    ) -> None:
        """Take the place of the routing of each layer.

        Args:
            chunks: megatron-core's layers, each with experts, by the stage's chunks.
            coefficient: `algorithm.load_balancing_coefficient`.
            num_layers: Of the whole model.
            tensor: The tensor-parallel ranks, which divide the sequence.
            context: The context-parallel ranks, which divide the row.
        """
        self._coefficient, self._num_layers = coefficient, num_layers
        self._tensor, self._groups = tensor, [one for one in (tensor, context) if one.size() > 1]
        self._paths: RowPaths | None = None
        self._is_recomputed = False
        self._kept: list[deque[RowPaths | None]] = []
        self._sums: list[list[Tensor]] = [[] for _ in chunks]
        self._current = torch.zeros(())
        for layer in (layer for chunk in chunks for layer in chunk):
            part: Any = layer
            kept: deque[RowPaths | None] = deque()
            self._kept.append(kept)
            router = part.mlp.router
            router.routing = partial(self._route, router.routing, kept)

    def begin(self, *, is_recomputed: bool) -> None:
        """Begin to run micro-batches; `is_recomputed`: the layers are computed again in their
        backward pass.
        """
        self._is_recomputed = is_recomputed
        for sums in self._sums:
            sums.clear()
        for kept in self._kept:
            kept.clear()

    @property
    def imbalances(self) -> list[Tensor]:
        """The weighted loss of each micro-batch, before its coefficient, over this stage's
        layers.
        """
        return [torch.stack(sums).sum() for sums in zip(*self._sums, strict=True)]

    @contextmanager
    def balance(
        self,
        row: Row,
        *,
        num_tokens: NDArray[np.int64],
        weights: NDArray[np.floating],
        device: torch.device,
        chunk: int = 0,
    ) -> Iterator[None]:
        """Balance the experts in the forward pass of a row in this context.

        Args:
            row: Of the micro-batch.
            num_tokens: Of each path.
            weights: Of each path in the loss.
            device: Of the model.
            chunk: Whose layers run.
        """
        owners = np.full(len(row.tokens), len(num_tokens))
        owners[: num_tokens.sum()] = np.repeat(np.arange(len(num_tokens)), num_tokens)
        size = len(row.token_indices) // self._tensor.size()
        first = self._tensor.rank() * size
        arrays = (
            owners[row.token_indices[first : first + size]],
            num_tokens.astype(np.float64),
            weights,
        )
        self._paths = RowPaths(*(torch.from_numpy(array).to(device) for array in arrays))
        self._current = torch.zeros((), dtype=torch.float64, device=device)
        self._sums[chunk].append(self._current)
        try:
            yield
        finally:
            self._paths = None

    def _route(
        self, routing: Routing, kept: deque[RowPaths | None], logits: Tensor, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        paths, is_forward = self._paths, True
        if self._is_recomputed:
            if torch.is_grad_enabled():  # of the backward pass: the forward pass has none here
                paths, is_forward = kept.popleft(), False
            else:
                kept.append(paths)
        if paths is None:
            return routing(logits, **arguments)
        later: list[Tensor] = []
        probabilities, routed = routing(_AddGradient.apply(logits, later), **arguments)
        gradient, imbalance = self._measure(logits.detach(), routed, paths)
        later.append(gradient.to(logits.dtype).view_as(logits))
        if is_forward:
            self._current += imbalance
        return probabilities, routed

    @torch.no_grad()
    def _measure(
        self, logits: Tensor, routed: Tensor, paths: RowPaths
    ) -> tuple[Float[Tensor, "own experts"], Tensor]:
        """Return the gradient of the loss at this rank's logits, and this layer's share of the
        weighted loss.
        """
        flat = logits.reshape(len(paths.owners), -1)
        probabilities = flat.softmax(-1, dtype=torch.promote_types(flat.dtype, torch.float32))
        used = self._sum_by_path(routed.to(probabilities.dtype), paths)
        counts = paths.num_tokens.to(probabilities.dtype)[:, None]
        scale = paths.weights.to(probabilities.dtype) * flat.shape[1] / self._num_layers
        slopes = scale[:, None] * used / counts / counts
        imbalance = (slopes * self._sum_by_path(probabilities, paths)).sum()
        padded = torch.cat([slopes, slopes.new_zeros(1, slopes.shape[1])])[paths.owners]
        mean = (probabilities * padded).sum(-1, keepdim=True)
        return self._coefficient * probabilities * (padded - mean), imbalance.double()

    def _sum_by_path(
        self, values: Float[Tensor, "own experts"], paths: RowPaths
    ) -> Float[Tensor, "paths experts"]:
        """Add up the values of each path's tokens, over the ranks that hold some; collective."""
        sums = values.new_zeros(len(paths.num_tokens) + 1, values.shape[1])
        sums.index_add_(0, paths.owners, values)
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        return sums[:-1]


def add_over_stages(imbalances: Sequence[Tensor], group: Any) -> Float[Tensor, " micro_batches"]:
    """Add up the loss of each micro-batch over the pipeline stages; collective."""
    sums = torch.stack(list(imbalances))
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums
