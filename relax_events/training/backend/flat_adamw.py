"""AdamW over flat tensors: one optimizer call for all parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.training.backend.state import StateSource

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_flat_adamw(
    values: Float[Tensor, " elements"],
    gradients: Float[Tensor, " elements"],
    moments: Mapping[str, Float[Tensor, " elements"]],
    *,
    num_decayed: int,
    config: TrainerConfig,
) -> torch.optim.AdamW:
    """Create AdamW over flat tensors, with all its state.

    Args:
        values: What it updates.
        gradients: What it reads.
        moments: Its moments by name.
        num_decayed: Elements from the first one on that weight decay applies to.
        config: Its settings.
    """
    parts = [(slice(0, num_decayed), config.weight_decay), (slice(num_decayed, None), 0.0)]
    segments = [
        (part, decay, nn.Parameter(values[part])) for part, decay in parts if values[part].numel()
    ]
    groups = [{"params": [segment], "weight_decay": decay} for _, decay, segment in segments]
    optimizer = torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
    )
    # Created here rather than at the first step, so that a state saved before it has the same
    # tensors as one saved after it.
    for part, _, segment in segments:
        segment.grad = gradients[part]
        step = torch.zeros((), dtype=torch.float32, device=segment.device)
        optimizer.state[segment] = {"step": step} | {
            name: moment[part] for name, moment in moments.items()
        }
    return optimizer


class FlatAdamW:
    """An `Optimizer` of `FlatParameters`."""

    def __init__(
        self,
        values: Float[Tensor, " elements"],
        gradients: Float[Tensor, " elements"],
        *,
        views: Callable[[Tensor], dict[str, Tensor]],
        num_decayed: int,
        config: TrainerConfig,
    ) -> None:
        """Make the optimizer, with moments of zero.

        Args:
            values: What it updates.
            gradients: What it reads.
            views: Returns the views of the parameters into a flat tensor, by name.
            num_decayed: Elements from the first one on that weight decay applies to.
            config: Its settings.
        """
        self._views = views
        self._moments = {name: torch.zeros_like(values) for name in MOMENTS}
        self._optimizer = make_flat_adamw(
            values, gradients, self._moments, num_decayed=num_decayed, config=config
        )

    def step(self, *, learning_rate: float) -> None:
        """Update the values."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def memory(self) -> list[Tensor]:
        """Return the moments."""
        return list(self._moments.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return moments and steps: `exp_avg.<name>`, `exp_avg_sq.<name>`,
        `optimizer.step.<group>`.
        """
        moments = {
            f"{kind}.{name}": view
            for kind, flat in self._moments.items()
            for name, view in self._views(flat).items()
        }
        steps = [
            self._optimizer.state[group["params"][0]]["step"]
            for group in self._optimizer.param_groups
        ]
        return moments | {f"optimizer.step.{index}": step for index, step in enumerate(steps)}

    def expected(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes that its tensors must have in a state, whatever the state has."""
        del saved
        return {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def load(self, state: StateSource) -> None:
        """Take over what `tensors` returned."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state.read(name))
