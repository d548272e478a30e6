"""How much memory backend `megatron` takes on the device of one rank: of the pipeline stage that
takes most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import gcd

from relax_events.config.run_config import RunConfig
from relax_events.config.topology import Topology
from relax_events.planning.inventory import CheckpointFacts, get_value_bytes
from relax_events.planning.memory import ParameterCounts, TrainerMemory

MOST_EXPERT_PARALLEL = 8
"""Over one machine: experts exchange tokens in each layer."""
TENSOR_SIZES, PIPELINE_SIZES = (1, 2, 4, 8), (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class MegatronMemory(TrainerMemory):
    """As `TrainerMemory`, of a model that the ranks of a topology hold together."""

    topology: Topology = field(default_factory=Topology)
    freezes_towers: bool = False

    def _counts(self) -> ParameterCounts:
        """Each rank has the weights and gradients of its part; the optimizer is divided over the
        ranks with the same parameters.
        """
        at, facts = self.topology, self.facts
        outer = facts.num_outer_parameters
        if at.pipeline > 1:  # the embedding on the first stage, the head on the last one
            outer = facts.vocab_size * facts.hidden_size
        layers = -(-facts.num_layers // at.pipeline) / facts.num_layers
        experts = facts.num_expert_parameters * layers / (at.expert * at.expert_tensor)
        towers, kept = facts.num_tower_parameters, 0
        inner = facts.num_parameters - facts.num_outer_parameters - facts.num_expert_parameters
        inner -= towers
        if self.freezes_towers:
            towers, kept = 0, towers
        # each rank of the first stage holds the towers whole
        dense = (outer + inner * layers) / at.tensor + towers
        copies = at.num_ranks // at.pipeline  # of each stage's ranks
        dense_copies = copies // at.tensor
        expert_copies = copies // (at.expert * at.expert_tensor)
        if self.adapter_rank:
            trained = facts.num_adapter_parameters(self.adapter_rank) / at.pipeline / at.tensor
            return ParameterCounts(dense + experts + kept, trained, trained / dense_copies)
        updated = dense / dense_copies + experts / expert_copies
        return ParameterCounts(kept, dense + experts, updated)

    def _gathered(self) -> dict[str, int]:
        return {}

    @property
    def cell_bytes(self) -> int:
        """Bytes of activations that one token of a micro-batch adds. The first stage holds as many
        micro-batches as there are stages, each with its share of the layers. With several chunks it
        begins more of these parts before it goes back through the first one.
        """
        at, facts, width = self.topology, self.facts, get_value_bytes(self.dtype)
        layers = -(-facts.num_layers // (at.pipeline * at.chunks))
        layer = facts.cell_bytes(self.dtype) // facts.num_layers
        begun = at.pipeline
        if at.chunks > 1:
            begun = 2 * (at.pipeline - 1) + (at.chunks - 1) * at.pipeline + 1
        held = layers * begun
        if self.recomputed != "none":
            kept = held * facts.hidden_size * width
            return -(-(kept + layer) // (at.tensor * at.context))
        return -(-held * layer // (at.tensor * at.context))

    def head_bytes(self, num_tokens: int) -> int:
        """As without division, of this rank's tokens and part of the vocabulary."""
        whole = TrainerMemory.head_bytes(self, -(-num_tokens // self.topology.context))
        return -(-whole // self.topology.tensor)

    def divisions(self, config: RunConfig, ranks: int) -> Iterator[dict[str, object]]:
        """Yield ways to divide the model over so many ranks: fewer stages first, since each more
        leaves ranks idle at the ends of a step; then narrower tensors.
        """
        facts = self.facts
        for pipeline, tensor in product(PIPELINE_SIZES, TENSOR_SIZES):
            is_whole = not (facts.num_kv_heads % tensor or facts.num_layers % pipeline)
            if not is_whole or ranks % (tensor * pipeline):
                continue
            values: dict[str, object] = {"trainer.ranks": ranks, "trainer.tensor_parallel": tensor}
            if pipeline > 1:
                values["trainer.pipeline_parallel"] = pipeline
            chunks = config.trainer.pipeline_chunks
            if chunks > 1 and (pipeline == 1 or facts.num_layers % (pipeline * chunks)):
                values["trainer.pipeline_chunks"] = 1
            copies = ranks // (tensor * pipeline)
            if copies > config.broker.partitions_per_version:
                values["broker.partitions_per_version"] = copies
            if facts.num_expert_parameters:
                values["trainer.expert_parallel"] = gcd(ranks // pipeline, MOST_EXPERT_PARALLEL)
            yield values


def memory_of_critic(config: RunConfig, facts: CheckpointFacts, *, on_gpu: bool) -> TrainerMemory:
    """Return what the critic of a run takes on the device of one rank: as a trainer of so many
    ranks.
    """
    trainer = config.trainer.model_copy(update={"ranks": config.critic_ranks})
    model = config.model.model_copy(update={"lora": None, "frozen": ()})
    like = config.model_copy(update={"trainer": trainer, "model": model})
    return memory_of_trainer(like, facts, on_gpu=on_gpu)


def memory_of_trainer(config: RunConfig, facts: CheckpointFacts, *, on_gpu: bool) -> TrainerMemory:
    """Return what the trainer of a run takes on the device of one rank; see
    `TrainerMemory.of_run`.
    """
    if config.trainer.backend != "megatron":
        return TrainerMemory.of_run(config, facts, on_gpu=on_gpu)
    trainer = config.trainer
    return MegatronMemory(
        facts=facts,
        dtype=config.model.dtype,
        recomputed=trainer.activation_checkpointing,
        on_gpu=on_gpu,
        topology=trainer.topology(),
        offloads_optimizer=trainer.offload_optimizer,
        freezes_towers="vision" in config.model.frozen,
        adapter_rank=0 if config.model.lora is None else config.model.lora.rank,
    )
