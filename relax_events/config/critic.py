"""The section `critic`: the value model of algorithms that need one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_events.config.base import DERIVED, OrDerived, Positive, Section
from relax_events.config.external_values import FilePath


class CriticConfig(Section):
    """The critic role, which algorithms with `gae_lambda` need. What is not said here (schedule,
    warm-up, AdamW's other settings, gradient norm, budget of a micro-batch, checkpoints) is as in
    `trainer`, what concerns the model as in `model`.
    """

    model_path: FilePath | None = None
    """Folder of the model that the critic begins as, with a new scalar head; left out, it is the
    policy's own, `model.path`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """AdamW's learning rate; left out, it is `trainer.learning_rate`."""
    num_epochs: Positive | None = None
    """Passes over each train batch; left out, `trainer.num_epochs`."""
    num_mini_batches: Positive | None = None
    """Optimizer steps of a pass; left out, `trainer.num_mini_batches`."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """How far from its recorded value a new value is rewarded for moving in a step; 0 for no such
    bound."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The run's first steps, in which only the critic learns: the policy's learning rate is 0, and
    its own warm-up begins after them."""
    threads: OrDerived[Annotated[int, Field(ge=0)]] = DERIVED
    """CPU threads; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""
