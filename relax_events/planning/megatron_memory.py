"""How much memory backend `megatron` takes on the device of one rank: of the pipeline stage that
takes most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_events.config.run_config import RunConfig
from relax_events.config.topology import Topology
from relax_events.planning.inventory import CheckpointFacts, width_of
from relax_events.planning.memory import TrainerMemory


@dataclass(frozen=True, slots=True)
class MegatronMemory(TrainerMemory):
    """As `TrainerMemory`, of a model that the ranks of a topology hold together."""

    topology: Topology = field(default_factory=Topology)

    def _state(self) -> dict[str, int]:
        """Each parameter in the dtype of the computation with a float32 gradient; float32 masters
        and moments are divided over the ranks with the same parameters.
        """
        at, known, width = self.topology, self.facts, width_of(self.dtype)
        outer = known.num_outer_parameters
        if at.pipeline > 1:  # the embedding on the first stage, the head on the last one
            outer = known.vocab_size * known.hidden_size
        layers = -(-known.num_layers // at.pipeline) / known.num_layers
        experts = known.num_expert_parameters * layers / (at.expert * at.expert_tensor)
        inner = known.num_parameters - known.num_outer_parameters - known.num_expert_parameters
        dense = (outer + inner * layers) / at.tensor
        copies = at.num_ranks // at.pipeline  # of each stage's ranks
        dense_copies = copies // at.tensor
        expert_copies = copies // (at.expert * at.expert_tensor)
        return {
            "weights": round((dense + experts) * width),
            "gradients": round((dense + experts) * 4),
            "float32 weights": round((dense / dense_copies + experts / expert_copies) * 4),
            "optimizer": round((dense / dense_copies + experts / expert_copies) * 8),
        }

    def _gathered(self) -> dict[str, int]:
        return {}

    @property
    def cell_bytes(self) -> int:
        """Bytes of activations that one token of a micro-batch adds. The first stage holds as many
        micro-batches as there are stages, each with its share of the layers.
        """
        at, known, width = self.topology, self.facts, width_of(self.dtype)
        layers = -(-known.num_layers // at.pipeline)
        layer = known.cell_bytes(self.dtype) // known.num_layers
        held = layers * at.pipeline
        if self.recomputed != "none":
            kept = held * known.hidden_size * width
            return -(-(kept + layer) // (at.tensor * at.context))
        return -(-held * layer // (at.tensor * at.context))

    def head_bytes(self, num_tokens: int) -> int:
        """As without division, of this rank's tokens and part of the vocabulary."""
        whole = TrainerMemory.head_bytes(self, -(-num_tokens // self.topology.context))
        return -(-whole // self.topology.tensor)


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
    )
