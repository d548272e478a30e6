"""The sections `trainer` and `sft_warmup`: what moves the weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import DERIVED, OrDerived, Positive, Seconds, Section
from relax_events.config.external_values import Code, Text


class TrainerConfig(Section):
    """The optimizer and what surrounds it."""

    backend: Code = "torch"
    """Entry point in the group `relax_events.trainer_backends`, or `path/to/file.py:Class`."""
    ranks: Positive = 1
    """Data-parallel processes on this machine."""
    learning_rate: OrDerived[Annotated[float, Field(gt=0)]] = DERIVED
    """AdamW's learning rate. Derived: 1e-6, for training all parameters of a pretrained model; 1e-3
    for a model that `[model.tiny]` makes."""
    num_epochs: Positive = 1
    """Passes over each train batch; each goes through it in another order, which follows from
    `run.seed` and the train step."""
    num_mini_batches: Positive = 1
    """Parts into which each pass deals the prompt groups of a train batch, whole: each part is an
    optimizer step. At most `run.prompts_per_step`. However many optimizer steps a train step has, it
    makes one policy version."""
    max_kl: Annotated[float, Field(ge=0)] = 0.0
    """Above 0, a train step of several optimizer steps ends before the one on whose mini-batch the
    mean KL estimate (k3, in nats a token) of the policy against the old one, below the ratio, has
    grown larger; the first is always taken."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Train steps over which the learning rate grows linearly from 0. All optimizer steps of a
    train step have its rate."""
    schedule: Literal["constant", "linear"] = "constant"
    """What follows the warm-up: the same rate to the end, or a linear fall that would reach 0 at
    `run.num_steps`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    max_abs_advantage: Annotated[float, Field(gt=0)] = 10_000.0
    """A sample whose advantage is larger at any token, either way, is refused, and its prompt group
    fails."""
    max_steps_not_finite: Positive = 3
    """So many train steps in a row whose loss or gradient is not finite end the run. Each of them
    skips its update: the next version has the same weights."""
    max_tokens_per_micro_batch: OrDerived[Positive] = DERIVED
    """Budget of one micro-batch in cells: its tokens, and where samples can't share rows their
    padding too. A longer sample stands alone.
    Derived: the memory of the trainer, less parameters, gradients, optimizer and the other models
        there, divided by the
    activations of a cell; at most 16,384 on a GPU and 8,192 on the CPU."""
    share_prompts: bool = True
    """Compute a prompt once for the samples of its group in a micro-batch, where that is cheaper;
    the same within rounding."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints at most; between them recovery replays the log."""
    checkpoint_seconds: Seconds = 900.0
    """Time between checkpoints, as far as steps allow: one is also begun at the end of the first
    step that ends so long after the last one began. So recovery replays about as much work, however
    long a step takes."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    threads: OrDerived[Annotated[int, Field(ge=0)]] = DERIVED
    """CPU threads of a rank, and of scorers; 0 takes all processors that the process may use.
    Derived: the processors, divided among the workers that compute on this machine."""
    collective_timeout_seconds: Seconds = 1800.0
    """Deadline of a collective between ranks: longer than the slowest rank needs for its part of
    a step and rank 0 for writing a version. A rank that dies is noticed at once, whatever this
    says."""

    @property
    def has_mini_batches(self) -> bool:
        """Whether a train step is more than one optimizer step."""
        return self.num_epochs * self.num_mini_batches > 1

    def checkpoint_is_due(self, policy_version: int, *, seconds: float) -> bool:
        """Tell whether a checkpoint of a version is to be written.

        Args:
            policy_version: The newest.
            seconds: Since the last one was begun, or since the process has taken up training.
        """
        return policy_version % self.checkpoint_every == 0 or seconds >= self.checkpoint_seconds


class SftWarmupConfig(Section):
    """A short supervised start, where reinforcement learning from random weights finds nothing to
    reinforce.
    """

    steps: Annotated[int, Field(ge=0)] = 0
    """Supervised steps at most; 0 means none."""
    target_loss: Annotated[float, Field(ge=0)] = 0.0
    """End the SFT warm-up once the loss per answer token, in nats, is below this: what is left is
    for reinforcement learning."""
    batch_size: Positive = 64
    """Problems in a supervised step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """AdamW's learning rate in the supervised steps."""
    assistant_turns_key: Text = ""
    """Where the run has an environment: what of a row's metadata lists the answers that a policy
    would give one after the other. The environment is asked between them, and all of them are
    learnt. Empty learns the reference answer, as the only one."""
