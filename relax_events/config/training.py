"""The sections `trainer`, `critic` and `sft_warmup`: settings of optimizers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_events.config.base import (
    BY_MACHINE,
    DERIVED,
    OrDerived,
    Positive,
    Seconds,
    Section,
    Threads,
)
from relax_events.config.external_values import Code, Quantities, Text
from relax_events.config.hub_names import ModelFolder
from relax_events.config.resume_rules import ROUNDING, SPEED, free, never
from relax_events.config.topology import Topology
from relax_events.errors import ConfigError

PARALLEL_KEYS = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)

ADAMW = "adamw"
MAX_CHECKPOINT_SECONDS = 900.0
"""The optimizer that every backend has of its own, over flat tensors."""


class TrainerConfig(Section):
    """The optimizer, batching and checkpoints."""

    backend: Annotated[Code, never("the checkpoint is that of another backend")] = "torch"
    """`torch`, `megatron` (needs the extra `megatron`), another entry point in the group
    `relax_events.trainer_backends`, or `path/to/file.py:Class`."""
    ranks: Annotated[Positive, free(ROUNDING)] = 1
    """Processes on this machine. Divided by `tensor_parallel`, `pipeline_parallel` and
    `context_parallel` they are the data-parallel ranks, each of which trains a part of the
    batch."""
    tensor_parallel: Annotated[Positive, free(ROUNDING)] = 1
    """Ranks over which each matrix is split. Backend `torch` takes none of the five `_parallel`
    sizes above 1. Backend `megatron` also splits the activations between matrices so, along the
    sequence."""
    pipeline_parallel: Annotated[Positive, free(ROUNDING)] = 1
    """Stages into which the layers are split."""
    pipeline_chunks: Annotated[Positive, free(ROUNDING)] = 1
    """Chunks of layers that each pipeline stage holds. They are dealt out over the stages in turn,
    and a micro-batch goes around as often: the stages wait less at the ends of a step, for more
    messages and activations (interleaved 1F1B). Times `pipeline_parallel` it must divide the number
    of layers."""
    context_parallel: Annotated[Positive, free(ROUNDING)] = 1
    """Ranks over which each sequence is split."""
    expert_parallel: Annotated[Positive, free(ROUNDING)] = 1
    """Ranks over which the experts of a layer are distributed. Times `expert_tensor_parallel` it
    divides the ranks of a pipeline stage."""
    expert_tensor_parallel: Annotated[Positive, free(ROUNDING)] = 1
    """Ranks over which the matrices of each expert are split."""
    sharding: Annotated[
        Literal["none", "full"], free("results agree within rounding; checkpoints fit both")
    ] = "none"
    """How backend `torch` lays the model out over `ranks`: `none` keeps all of it on each rank, 18
    bytes a parameter; `full` divides weights, gradients and optimizer by the ranks (FSDP2), and
    gathers each layer when it is needed."""
    activation_checkpointing: Annotated[
        Literal["none", "whole", "selective"], free("memory against computation")
    ] = "none"
    """What is kept of each decoder layer for the backward pass: all activations; its input alone
    (`whole`), for about a third more computation; or, by backend `torch`, also the results of
    attention (`selective`), which cost most for long samples."""
    offload_optimizer: Annotated[bool, free(ROUNDING)] = False
    """Keep the optimizer's state in the host's memory and update it by the processors: moments, and
    float32 master weights where ranks don't divide these. Frees 8 to 12 bytes a parameter of a GPU,
    divided as the optimizer is, for a slower update. Not run on a GPU yet."""
    learning_rate: OrDerived[Annotated[float, Field(gt=0)]] = DERIVED
    """AdamW's learning rate. Derived: 1e-6, for training all parameters of a pretrained model; 1e-5
    for its adapters (`model.lora`); 1e-3 for a model made by `[model.tiny]`."""
    num_epochs: Positive = 1
    """Passes over each train batch, each in a different order derived from `run.seed` and the train
    step."""
    num_mini_batches: Positive = 1
    """Mini-batches of each pass, each an optimizer step over whole prompt groups. At most
    `run.prompts_per_step`. A train step makes one policy version, whatever its number of optimizer
    steps."""
    max_kl: Annotated[float, Field(ge=0)] = 0.0
    """Above 0, a train step ends early, before the first mini-batch whose mean KL estimate (k3,
    nats per token) between policy and old policy exceeds this. The first mini-batch is always
    trained."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Train steps over which the learning rate grows linearly from 0. All optimizer steps of a
    train step use the same rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a decay that ends at `run.num_steps`, linear or
    along half a cosine."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where a decay ends, relative to `learning_rate`. Schedule `constant` takes none."""
    optimizer: Annotated[Code, never("the checkpoint has the state of another optimizer")] = ADAMW
    """`adamw`, `sgd`, `adafactor`, another entry point in the group `relax_events.optimizers`, or
    `path/to/file.py:Class`: a class with the interface of torch.optim. Only backend `torch` without
    `sharding` takes another one than `adamw`: the others divide parameters."""
    optimizer_options: Quantities = Field(default_factory=dict)
    """More keyword arguments of another optimizer than `adamw`, such as `momentum`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates, or those of an optimizer that takes `betas`."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon, or that of an optimizer that takes `eps`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay, of matrices alone; or that of another optimizer."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    max_abs_advantage: Annotated[float, Field(gt=0), free("when a sample counts as failed")] = (
        10_000.0
    )
    """A sample with a larger absolute advantage at any token is rejected, and its prompt group
    fails."""
    max_steps_not_finite: Annotated[Positive, free("when to give up")] = 3
    """Consecutive train steps with a loss or gradient that is not finite before the run ends. Each
    of them skips its update: the next version has the same weights."""
    max_start_mismatch: Annotated[float, Field(ge=0), free("when to give up")] = 1e-3
    """Largest `mismatch_kl`, in nats per token, in the first train step, where engine and trainer
    have the same weights. A run with a larger one ends before the step is committed. 0 takes any.
    """
    max_tokens_per_micro_batch: Annotated[OrDerived[Positive], BY_MACHINE, free(ROUNDING)] = DERIVED
    """Budget of one micro-batch in token cells, including padding where samples can't share rows.
    The paths of a longer sample run in several passes of at most so many; a longer path runs alone.
    Derived: free memory of the trainer, after
    parameters, gradients, optimizer and other models, divided by the activations of a cell; at most
    16,384 on a GPU and 8,192 on the CPU."""
    share_prompts: Annotated[bool, free(ROUNDING)] = True
    """Compute once what token sequences of a micro-batch begin with: the prompt of a prompt group,
    the turns that branches of an episode have in common. The same result within rounding. Models
    with linear or sliding attention compute each sequence by itself, and so does `attention =
    "eager"`."""
    checkpoint_every: Annotated[Positive, free("how much is trained again after a crash")] = 50
    """Maximum steps between checkpoints; recovery replays the log from the newest one. One also
    begins at the end of the first step that ends 15 minutes after the last one began, so recovery
    replays about the same amount of work for slow and fast steps."""
    keep_checkpoints: Annotated[Positive, free("what is kept")] = 2
    """Number of newest checkpoints to keep."""
    threads: Annotated[Threads, free(ROUNDING)] = DERIVED
    """CPU threads of a rank and of scorers; 0 uses all available processors. Derived: the
    processors, divided among the workers that compute on this machine."""
    collective_timeout_seconds: Annotated[Seconds, free("when a rank counts as lost")] = 1800.0
    """Deadline of a collective between ranks: longer than the slowest rank's part of a step, and
    than rank 0's writing of a version. A dead rank is detected at once in any case."""

    def topology(self, num_ranks: int | None = None) -> Topology:
        """Return how the ranks are laid out.

        Args:
            num_ranks: Those that run; by default `ranks`.
        Raises:
            ConfigError: The ranks can't be divided so; the text names the smallest changes that
                fit.
        """
        return Topology.of(
            self.ranks if num_ranks is None else num_ranks,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            context=self.context_parallel,
            expert=self.expert_parallel,
            expert_tensor=self.expert_tensor_parallel,
            chunks=self.pipeline_chunks,
        )

    @model_validator(mode="after")
    def _minimum_is_used(self) -> TrainerConfig:
        if self.schedule == "constant" and self.min_learning_rate_ratio:
            raise ValueError(
                "schedule = 'constant' never decays, and trainer.min_learning_rate_ratio is "
                f"{self.min_learning_rate_ratio:g}; choose schedule 'cosine' or 'linear', or leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_has_whole_parameters(self) -> TrainerConfig:
        if self.optimizer == ADAMW:
            if self.optimizer_options:
                raise ValueError(
                    f"trainer.optimizer_options = {self.optimizer_options} are for another "
                    "optimizer than 'adamw', which has keys of its own; set trainer.optimizer, or "
                    "leave them out"
                )
            return self
        divided = {"backend": "torch", "sharding": "none"}
        for key, needed in divided.items():
            if (value := getattr(self, key)) != needed:
                raise ValueError(
                    f"trainer.optimizer = {self.optimizer!r} updates whole parameters, and "
                    f"trainer.{key} = {value!r} divides them; set trainer.{key} = {needed!r}, or "
                    "leave trainer.optimizer out"
                )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> TrainerConfig:
        try:
            self.topology()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        split = [key for key in PARALLEL_KEYS if getattr(self, key) > 1]
        if self.backend == "torch" and split:
            raise ValueError(
                f"trainer.backend = 'torch' keeps each layer whole, and trainer.{split[0]} is "
                f"{getattr(self, split[0])}; set it to 1, or set trainer.backend = 'megatron'"
            )
        return self

    @property
    def divides_model(self) -> bool:
        """Whether each rank holds a part of the model."""
        return self.sharding != "none" or any(getattr(self, key) > 1 for key in PARALLEL_KEYS)

    @property
    def has_mini_batches(self) -> bool:
        """Whether a train step is more than one optimizer step."""
        return self.num_epochs * self.num_mini_batches > 1

    def checkpoint_is_due(self, policy_version: int, *, seconds: float) -> bool:
        """Return whether a checkpoint of a version is to be written.

        Args:
            policy_version: The newest.
            seconds: Since the last one began, or since this process began to train.
        """
        return policy_version % self.checkpoint_every == 0 or seconds >= MAX_CHECKPOINT_SECONDS


class SftWarmupConfig(Section):
    """A short supervised warm-up, for models with random weights that would get no reward
    otherwise.
    """

    steps: Annotated[int, Field(ge=0)] = 0
    """Maximum supervised steps; 0 disables the warm-up."""
    target_loss: Annotated[float, Field(ge=0)] = 0.0
    """End the warm-up once the loss per target token, in nats, is below this."""
    batch_size: Positive = 64
    """Problems in a supervised step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """AdamW's learning rate in the supervised steps."""
    assistant_turns_key: Text = ""
    """For runs with an environment: metadata key of a row that lists the assistant turns in order.
    The environment is called between them, and all of them are trained on. Empty trains on the
    reference answer alone."""
    replies_key: Text = ""
    """Metadata key of a row that lists the messages between the assistant turns, as objects with
    `role` and `content`: for runs with `environment.command`, and for others to spare the calls of
    the environment."""


class CriticConfig(Section):
    """The critic role, which algorithms with `gae_lambda` need. Other settings (schedule, warm-up,
    AdamW, gradient norm, micro-batch budget, checkpoints) are those of `trainer` and `model`.
    """

    model_path: Annotated[ModelFolder | None, never("the critic has been made from it")] = None
    """Folder of the critic's initial model, or a name as in `model.path`, which gets a new scalar
    head; by default the policy's own, `model.path`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """AdamW's learning rate; by default `trainer.learning_rate`."""
    num_epochs: Positive | None = None
    """Passes over each train batch; by default `trainer.num_epochs`."""
    num_mini_batches: Positive | None = None
    """Optimizer steps of a pass; by default `trainer.num_mini_batches`."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """Clip range of a new value around its recorded value; 0 disables clipping."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the run in which only the critic learns: the policy makes no update, and its
    own warm-up begins after them."""
    ranks: Annotated[Positive | None, free(ROUNDING)] = None
    """Processes that hold the critic together, laid out by the trainer's `_parallel` sizes; what is
    left is data parallel. By default `trainer.ranks` where these hold parts of the model (one of
    the `_parallel` sizes is above 1, or `trainer.sharding` is `full`), else 1."""
    threads: Annotated[Threads, free(SPEED)] = DERIVED
    """CPU threads; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""
