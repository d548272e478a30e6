"""How much memory the models of a run take on a device, by part. Pure arithmetic over a
checkpoint's sizes; `docs/benchmarks.md` compares it with what a train step takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from relax_events.config.run_config import RunConfig
from relax_events.planning.inventory import CheckpointFacts, get_value_bytes

MAX_LOGITS_ELEMENTS = 2**26
"""Above this, the output head works in chunks: 256 MiB of float32 at a time."""
LOGITS_COPIES = 6
"""Arrays of the head's size in float32 that a chunk holds at once: logits, the same over
temperature, log-probabilities, their exponentials, the entropy's product, and the gradient."""
RESERVED_GPU_BYTES, RESERVED_CPU_BYTES = 2_000_000_000, 500_000_000
"""What a process needs besides its model: libraries, kernels, the allocator's gaps."""
GATHERED_LAYERS = 2
"""Whole layers of a sharded model: the layer that computes, and the next one."""

Recomputed = Literal["none", "whole", "selective"]


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one device, by part; the order is that of the table."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


class ParameterCounts(NamedTuple):
    """Parameters of one rank: without gradients, with gradients, and of the latter the number that
    its optimizer updates.
    """

    frozen: float
    trained: float
    updated: float


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """What backend `torch` takes on the device of one rank.

    Attributes:
        facts: Of the trained checkpoint.
        dtype: Of the computation.
        num_pieces: Ranks that weights, gradients and moments are divided over; 1 where each rank
            has all of them.
        adapter_rank: Of the adapters, where only they are trained; 0 for all parameters.
        recomputed: `trainer.activation_checkpointing`.
        on_gpu: Whether the device is a GPU.
        offloads_optimizer: `trainer.offload_optimizer`; on the CPU it saves nothing, and what is
            kept for the host is in the same memory.
    """

    facts: CheckpointFacts
    dtype: str
    num_pieces: int = 1
    adapter_rank: int = 0
    recomputed: Recomputed = "none"
    on_gpu: bool = True
    offloads_optimizer: bool = False

    @classmethod
    def of_run(cls, config: RunConfig, facts: CheckpointFacts, *, on_gpu: bool) -> TrainerMemory:
        """Return what the trainer of a run takes on the device of one rank.

        Args:
            config: With `model.dtype`.
            facts: Of `model.path`.
            on_gpu: Whether the trainer runs on GPUs.
        """
        trainer, lora = config.trainer, config.model.lora
        return cls(
            facts=facts,
            dtype=config.model.dtype,
            num_pieces=trainer.ranks if trainer.sharding == "full" else 1,
            adapter_rank=lora.rank if lora is not None else 0,
            recomputed=trainer.activation_checkpointing,
            on_gpu=on_gpu,
            offloads_optimizer=trainer.offload_optimizer,
        )

    def parts(self, num_tokens: int) -> MemoryParts:
        """Return the peak in a train step by part.

        Args:
            num_tokens: Token cells of a micro-batch.
        """
        return MemoryParts(
            self._state()
            | self._gathered()
            | {
                "activations": num_tokens * self.cell_bytes,
                "output head": self.head_bytes(num_tokens),
                "process": RESERVED_GPU_BYTES if self.on_gpu else RESERVED_CPU_BYTES,
            }
        )

    @property
    def host_bytes(self) -> int:
        """What the optimizer of one rank takes of the host's memory where it is not on the device:
        its state, float32 masters and a copy of the gradients.
        """
        per_parameter = self.facts.optimizer_bytes + 8
        return round(self._counts().updated * per_parameter) if self._is_away else 0

    @property
    def _is_away(self) -> bool:
        return self.offloads_optimizer and self.on_gpu

    def _state(self) -> dict[str, int]:
        """Return what is held from step to step. Sharded weights are float32 masters themselves."""
        counts, width = self._counts(), get_value_bytes(self.dtype)
        is_own_master = width == 4 or self.num_pieces > 1
        state = {
            "weights": counts.frozen * width + counts.trained * (4 if is_own_master else width),
            "float32 weights": 0 if is_own_master or self._is_away else counts.updated * 4,
            "gradients": counts.trained * 4,
            "optimizer": 0 if self._is_away else counts.updated * self.facts.optimizer_bytes,
        }
        if self.offloads_optimizer and not self._is_away:
            # whole parameters: gradients, and masters of float32 weights; sharded ones: masters
            has_both = width == 4 and self.num_pieces == 1
            state["copies for the host"] = counts.updated * (8 if has_both else 4)
        return {name: round(num_bytes) for name, num_bytes in state.items()}

    def _counts(self) -> ParameterCounts:
        facts = self.facts
        if self.adapter_rank:
            frozen, trained = facts.num_parameters, facts.num_adapter_parameters(self.adapter_rank)
        else:
            frozen, trained = 0, facts.num_parameters
        updated = trained / self.num_pieces
        return ParameterCounts(frozen / self.num_pieces, updated, updated)

    def _gathered(self) -> dict[str, int]:
        """What a sharded model holds whole while it computes: embeddings and head with their
        gradient, and some layers; and the float32 buffer of the larger one's reduction.
        """
        if self.num_pieces == 1:
            return {}
        facts, width = self.facts, get_value_bytes(self.dtype)
        outer = facts.num_outer_parameters
        layer = (facts.num_parameters - outer) // facts.num_layers
        whole = (2 * outer + (GATHERED_LAYERS + 1) * layer) * width
        return {"gathered layers": whole + 4 * max(outer, layer)}

    @property
    def cell_bytes(self) -> int:
        """Bytes of activations that one token adds."""
        facts, width = self.facts, get_value_bytes(self.dtype)
        whole = facts.cell_bytes(self.dtype)
        if self.recomputed == "none":
            return whole
        kept = facts.num_layers * facts.hidden_size * width
        if self.recomputed == "selective":
            kept += facts.num_layers * facts.num_heads * (facts.head_dim * width + 4)
        return kept + whole // facts.num_layers

    def head_bytes(self, num_tokens: int) -> int:
        """Bytes of a chunk's logits, and of the float32 sum of the head's gradient where there are
        several chunks.
        """
        facts = self.facts
        chunk = max(1, MAX_LOGITS_ELEMENTS // facts.vocab_size)
        rows = min(num_tokens, chunk)
        logits = rows * facts.vocab_size * (get_value_bytes(self.dtype) + 4 * LOGITS_COPIES)
        gradient = 0 if self.adapter_rank else facts.vocab_size * facts.hidden_size
        wide = 4 * gradient if num_tokens > chunk else 0
        return logits + wide + get_value_bytes(self.dtype) * gradient

    def most_tokens(self, num_bytes: float, *, unit: int, most: int) -> int:
        """Return how many token cells fit.

        Args:
            num_bytes: Of the device, for this rank.
            unit: The result is a multiple of it.
            most: Upper bound.
        """
        counts = range(unit, most + 1, unit)
        return unit * bisect_right(counts, num_bytes, key=lambda count: self.parts(count).total)

    def divisions(self, config: RunConfig, ranks: int) -> Iterator[dict[str, object]]:
        """Yield ways to divide the model over so many ranks, from small to large changes."""
        values: dict[str, object] = {"trainer.sharding": "full", "trainer.ranks": ranks}
        if ranks > config.broker.partitions_per_version:
            values["broker.partitions_per_version"] = ranks
        yield values
