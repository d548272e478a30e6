"""The section `critic`: the value model of algorithms that need one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_events.config.base import DERIVED, Positive, Section, Threads
from relax_events.config.external_values import FilePath
from relax_events.config.resume_rules import ROUNDING, SPEED, free, never


class CriticConfig(Section):
    """The critic role, which algorithms with `gae_lambda` need. Other settings (schedule, warm-up,
    AdamW, gradient norm, micro-batch budget, checkpoints) are those of `trainer` and `model`.
    """

    model_path: Annotated[FilePath | None, never("the critic has been made from it")] = None
    """Folder of the critic's initial model, which gets a new scalar head; by default the policy's
    own, `model.path`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """AdamW's learning rate; by default `trainer.learning_rate`."""
    num_epochs: Positive | None = None
    """Passes over each train batch; by default `trainer.num_epochs`."""
    num_mini_batches: Positive | None = None
    """Optimizer steps of a pass; by default `trainer.num_mini_batches`."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """Clip range of a new value around its recorded value; 0 disables clipping."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the run in which only the critic learns: the policy's learning rate is 0, and
    its own warm-up begins after them."""
    ranks: Annotated[Positive | None, free(ROUNDING)] = None
    """Processes that hold the critic together, laid out by the trainer's `_parallel` sizes; what is
    left is data parallel. By default `trainer.ranks` where these hold parts of the model (one of
    the `_parallel` sizes is above 1, or `trainer.sharding` is `full`), else 1."""
    threads: Annotated[Threads, free(SPEED)] = DERIVED
    """CPU threads; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""
