"""What defaults are derived from: a checkpoint, and the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

COMPUTING_ROLES = (
    "rollout",
    "judge",
    "reference",
    "actor-forward",
    "critic",
    "teacher",
    "evaluator",
)
"""Roles that hold a model, besides the trainer."""

MIXTURE_RATIO = 1.5
"""A model whose layers have so many times the parameters that a token goes through is a mixture of
experts."""


def num_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def num_threads(threads: int) -> int:
    """Return how many CPU threads a key of the run file means: 0 stands for one a processor."""
    return threads or num_processors()


ADAMW_BYTES = 8.0
"""Two moments in float32 for each parameter."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a checkpoint's `config.json` and the headers of its files say; `mlp_size` is the width
    that a token goes through.
    """

    dtype: str
    num_parameters: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position_embeddings: int
    has_tied_head: bool = True
    num_tower_parameters: int = 0
    """Of the vision and audio towers, among `num_parameters`."""
    optimizer_bytes: float = ADAMW_BYTES
    """Of the optimizer's state for each parameter that is trained; `trainer.optimizer`'s where that
    is another one than AdamW."""
    architecture: str = "unknown"

    @property
    def num_outer_parameters(self) -> int:
        """Parameters of the embeddings and the output head, which may be the same."""
        return (1 if self.has_tied_head else 2) * self.vocab_size * self.hidden_size

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all experts; 0 where the model is no mixture."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        rest = self.num_layers * self.hidden_size * attention
        outer = self.num_outer_parameters + self.num_tower_parameters
        inner = self.num_parameters - outer - rest
        one_token = 3 * self.num_layers * self.hidden_size * self.mlp_size
        return inner if inner > MIXTURE_RATIO * one_token else 0

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through, the output head included: of a mixture, the
        experts that it is routed to.
        """
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.mlp_size)
        return self.vocab_size * self.hidden_size + self.num_layers * layer

    def cell_bytes(self, dtype: str) -> int:
        """Return what the activations of one token take that the backward pass needs.

        Source: saved tensors of Qwen3 layers at real width, counted: 2.0 MB (0.6B), 3.2 MB (1.7B),
        6.1 MB (4B), 7.8 MB (8B) in bfloat16.
        """
        values = (
            4 * self.mlp_size
            + 8 * self.hidden_size
            + 4 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        )
        return values * self.num_layers * get_value_bytes(dtype)

    def cache_bytes(self, dtype: str) -> int:
        """Return what a token takes in the engine's cache of keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * get_value_bytes(dtype)

    def training_bytes(self, dtype: str, *, adapter_rank: int = 0) -> int:
        """Return what weights, gradients and the optimizer's state take: with AdamW 16 bytes a
        trained parameter, and 18 where the weights have float32 masters.

        Args:
            dtype: Of the weights.
            adapter_rank: Rank of the adapters, where only they are trained; 0 for all parameters.
        """
        trained = (8 if dtype == "float32" else 10) + self.optimizer_bytes
        if not adapter_rank:
            return round(self.num_parameters * trained)
        return self.num_parameters * get_value_bytes(dtype) + round(
            self.num_adapter_parameters(adapter_rank) * trained
        )

    def num_adapter_parameters(self, rank: int) -> int:
        """Return the parameters of adapters on all linear layers of a dense model; a mixture has
        fewer.
        """
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = 2 * (self.hidden_size + query) + 2 * (self.hidden_size + key)
        return rank * self.num_layers * (widths + 3 * (self.hidden_size + self.mlp_size))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where workers run: its processors, its memory, the memory of its GPUs, and how many workers
    of each role are there. `log_room_bytes` is what is free where the embedded broker keeps the
    log, 0 where another broker keeps it, or that is not known. With `num_hosts`, what several
    machines have together.
    """

    num_processors: int
    memory_bytes: int
    gpu_bytes: tuple[int, ...] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    log_room_bytes: int = 0
    num_hosts: int = 1

    @property
    def num_computing(self) -> int:
        """How many workers compute; a trainer counts as its ranks."""
        return max(sum(self.roles.get(role, 0) for role in (*COMPUTING_ROLES, "trainer")), 1)


def get_value_bytes(dtype: str) -> int:
    """Return the bytes of a value."""
    return 4 if dtype == "float32" else 2


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes in GB, or in MB if it is less than one."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
