"""The sections `trainer` and `warm_start`: what moves the weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import Positive, Seconds, Section


class TrainerConfig(Section):
    """The optimizer and what surrounds it."""

    backend: str = "torch"
    """Entry point in the group `relax_events.trainer_backends`, or `path/to/file.py:Class`."""
    ranks: Positive = 1
    """Data-parallel processes; above 1 they are started by torchrun."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """AdamW's learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate grows linearly from 0."""
    schedule: Literal["constant", "linear"] = "constant"
    """What follows the warm-up: the same rate to the end, or a linear fall that would reach 0 at `run.num_steps`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    max_tokens_per_micro_batch: Positive = 8192
    """Token budget of one packed micro-batch."""
    share_prompts: bool = True
    """Compute a prompt once for the samples of its group in a micro-batch, where that is cheaper; the same within rounding."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints; between them recovery replays the log."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    threads: Annotated[int, Field(ge=0)] = 1
    """CPU threads of a rank; 0 leaves the choice to torch."""
    collective_timeout_seconds: Seconds = 120.0
    """Deadline of a collective between ranks."""


class WarmStartConfig(Section):
    """A short supervised start, where reinforcement learning from random weights finds nothing to reinforce."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Supervised steps at most; 0 means none."""
    target_loss: Annotated[float, Field(ge=0)] = 0.0
    """End the warm start once the loss per answer token, in nats, is below this: what is left is for reinforcement learning."""
    batch_size: Positive = 64
    """Problems in a supervised step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """AdamW's learning rate in the supervised steps."""
    answers_key: str = ""
    """Where the run has an environment: what of a row's metadata lists the answers that a policy would give one after the other. The environment is
    asked between them, and all of them are learnt. Empty learns the reference answer, as the only one."""
