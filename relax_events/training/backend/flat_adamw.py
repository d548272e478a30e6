"""AdamW over flat tensors: one optimizer call for all parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.training.backend.state import StateSource

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """An `Optimizer` of a `FlatPart`."""

    def __init__(
        self,
        values: Float[Tensor, " elements"],
        gradients: Float[Tensor, " elements"],
        *,
        num_decayed: int,
        config: TrainerConfig,
    ) -> None:
        """Create AdamW with all its state, so that a state saved before the first step has the same
        tensors as one saved after it.

        Args:
            values: What it updates.
            gradients: What it reads.
            num_decayed: Elements from the first one on that weight decay applies to.
            config: Its settings.
        """
        self.moments: Mapping[str, Tensor] = {name: torch.zeros_like(values) for name in MOMENTS}
        parts = [(slice(0, num_decayed), config.weight_decay), (slice(num_decayed, None), 0.0)]
        segments = [
            (part, decay, nn.Parameter(values[part]))
            for part, decay in parts
            if values[part].numel()
        ]
        groups = [{"params": [segment], "weight_decay": decay} for _, decay, segment in segments]
        self._optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
        )
        self._steps = [torch.zeros((), dtype=torch.float32, device=values.device) for _ in segments]
        for (part, _, segment), step in zip(segments, self._steps, strict=True):
            segment.grad = gradients[part]
            self._optimizer.state[segment] = {"step": step} | {
                name: moment[part] for name, moment in self.moments.items()
            }

    def step(self, *, learning_rate: float) -> None:
        """Update the values."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def memory(self) -> list[Tensor]:
        """Return the moments."""
        return list(self.moments.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the steps: `optimizer.step.<group>`."""
        return {f"optimizer.step.{index}": step for index, step in enumerate(self._steps)}

    def expected(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes that its tensors must have in a state, whatever the state has."""
        del saved
        return {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def load(self, state: StateSource) -> None:
        """Take over what `tensors` returned."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state.read(name))
