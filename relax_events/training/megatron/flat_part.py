"""A flat tensor of parameters that the same ranks hold, with its gradients and AdamW. Each of these
ranks keeps master weights and moments of an equal slice (the distributed optimizer).

    gradients ── sum over ranks, to the owner of each slice ──▶ AdamW ──▶ weights of all slices
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from relax_events.config import TrainerConfig
from relax_events.training.backend.flat_adamw import MOMENTS, make_flat_adamw
from relax_events.training.backend.flat_parameters import add_gradients_to
from relax_events.training.backend.host_optimizer import copy_to_host, on_device
from relax_events.training.megatron.layout import Shard
from relax_events.training.megatron.slices import FlatPiece, flat_pieces

Parameters = Sequence[tuple[Shard, nn.Parameter]]


class FlatPart:
    """See the module's docstring. All methods but `pieces` and `squares` may be collective over the
    group.
    """

    def __init__(self, parameters: Parameters, *, config: TrainerConfig, group: Any) -> None:
        """Move parameters into a flat tensor, matrices first: weight decay applies to them alone.

        Args:
            parameters: With their place in the model; all matrices stand before all vectors.
            config: AdamW's settings.
            group: The ranks that hold the same parameters.
        """
        self._group, self._parameters = group, parameters
        sizes = [parameter.numel() for _, parameter in parameters]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        num_decayed = sum(one.numel() for _, one in parameters if one.ndim >= 2)
        slice_size = -(-sum(sizes) // group.size())
        first = parameters[0][1]
        self._values = torch.zeros(
            slice_size * group.size(), dtype=first.dtype, device=first.device
        )
        master = torch.promote_types(first.dtype, torch.float32)
        self._gradients = torch.zeros_like(self._values, dtype=master)
        self._has_masters = config.offload_optimizer or master != first.dtype
        for (_, parameter), start in zip(parameters, self._starts, strict=True):
            self._tie(parameter, start)
        self._start = group.rank() * slice_size
        self._own_values = self._values[self._start : self._start + slice_size]
        self._own_gradients = self._gradients[self._start : self._start + slice_size]
        self._masters, self._read_gradients = self._own_values.to(master), self._own_gradients
        if config.offload_optimizer:
            self._masters = copy_to_host(self._own_values, dtype=master)
            self._read_gradients = copy_to_host(self._own_gradients)
        self._moments = {name: torch.zeros_like(self._masters) for name in MOMENTS}
        self._optimizer = make_flat_adamw(
            self._masters,
            self._read_gradients,
            self._moments,
            num_decayed=min(max(num_decayed - self._start, 0), slice_size),
            config=config,
        )

    def _tie(self, parameter: nn.Parameter, start: int) -> None:
        """Let a parameter and its gradient be views into the flat tensors."""
        part = slice(start, start + parameter.numel())
        value, gradient = self._values[part], self._gradients[part].view(parameter.shape)
        value.copy_(parameter.detach().flatten())
        parameter.data = value.view(parameter.shape)
        if gradient.dtype != parameter.dtype:
            add_gradients_to(gradient, parameter)
        else:
            parameter.grad = gradient

    def set_step(self, step: Tensor) -> None:
        """Set the number of optimizer steps."""
        for group in self._optimizer.param_groups:
            self._optimizer.state[group["params"][0]]["step"].copy_(step)

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self._gradients.zero_()

    def gradients(self, begin: int, end: int) -> Tensor:
        """Return the gradients of consecutive parameters, as a view."""
        stop = self._starts[end] if end < len(self._starts) else len(self._gradients)
        first = self._starts[begin] if begin < len(self._starts) else stop
        return self._gradients[first:stop]

    def reduce_gradients(self) -> None:
        """Sum the gradients over the group; each rank gets the sums of its slice."""
        if self._group.size() > 1:
            total = torch.empty_like(self._own_gradients)
            dist.reduce_scatter_tensor(total, self._gradients, group=self._group)
            self._own_gradients.copy_(total)

    def normalise_gradients(self, normaliser: float) -> None:
        """Divide the gradients of the own slice."""
        self._own_gradients /= normaliser

    def squares(self, begin: int, end: int) -> float:
        """Return the sum of the squared gradients of consecutive parameters in the own slice."""
        bounds = [*self._starts, len(self._gradients)]
        low, high = (
            min(max(bounds[at] - self._start, 0), len(self._own_gradients)) for at in (begin, end)
        )
        return float(torch.linalg.vector_norm(self._own_gradients[low:high])) ** 2

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one AdamW step, and zero the gradients."""
        if gradient_scale != 1.0:
            self._own_gradients *= gradient_scale
        if self._read_gradients is not self._own_gradients:
            self._read_gradients.copy_(self._own_gradients)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.share_values()
        self.zero_gradients()

    @torch.no_grad()
    def share_values(self) -> None:
        """Round the master weights of each slice into the weights of all ranks."""
        weights = self._masters.to(self._values.dtype).to(self._values.device)
        if self._group.size() > 1:
            # a float32 model's masters are a part of its weights
            mine = weights if self._has_masters else weights.clone()
            dist.all_gather_into_tensor(self._values, mine, group=self._group)
        elif self._has_masters:
            self._values.copy_(weights)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of the part between two steps: what must be kept while it
        is off the device, and what `rebuild` computes again.
        """
        kept = on_device([self._masters, *self._moments.values()], self._values.device)
        rebuilt = [self._gradients]
        (rebuilt if self._rounds_alone else kept).append(self._values)
        return kept, rebuilt

    def rebuild(self) -> None:
        """Compute what was not kept; local to the rank."""
        if self._rounds_alone:
            self.share_values()
        self.zero_gradients()

    @property
    def _rounds_alone(self) -> bool:
        """Whether all weights are rounded from master weights of this rank."""
        return self._has_masters and self._group.size() == 1

    def pieces(self, index: int) -> Iterator[tuple[FlatPiece, dict[str, Tensor]]]:
        """Yield the pieces of a parameter in the own slice, with master weights and moments."""
        end = self._start + len(self._masters)
        shard, _ = self._parameters[index]
        for piece in flat_pieces(shard, first=self._starts[index], start=self._start, end=end):
            values = {"model": self._masters} | self._moments
            yield piece, {kind: piece.of(flat) for kind, flat in values.items()}
