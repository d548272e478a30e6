"""The section `model.lora`: train low-rank adapters instead of the model's own weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from relax_events.config.base import Positive, Section
from relax_events.config.external_values import Names


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, by `peft`): each target module's output gains
    `alpha / rank * B @ A @ input`. Only A and B are trained, published and stored.

    `model.path` stays as it is: engine, trainer and scorers load it from their own disks, and its
    digest stands in every version's manifest.
    """

    rank: Positive = 16
    """Rows of A, and columns of B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Divided by the rank, it scales the adapters' output."""
    dropout: float = 0.0
    """Only 0: the engine generates without dropout, so the trainer would learn from the samples of
    another policy."""
    target_modules: Annotated[tuple[str, ...], Names.NOTHING] = ()
    """Linear layers of the language model that get adapters, by the last parts of their names, such
    as `["q_proj", "v_proj"]`. Empty: all of them. Experts of a mixture have none."""

    @field_validator("dropout")
    @classmethod
    def _is_zero(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"dropout must be 0, got {dropout:g}: the engine generates without it, so the "
                "trainer would learn from the samples of another policy; leave it out"
            )
        return dropout

    @property
    def scaling(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / self.rank
