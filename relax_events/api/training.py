"""The contract of trainer backends, and what they are given."""

from relax_events.config import MediaConfig, ModelConfig, RunConfig, TrainerConfig
from relax_events.config.lora import LoRAConfig
from relax_events.config.topology import Coordinates, Topology
from relax_events.training.backend.protocol import (
    Critic,
    OffloadingBackend,
    SampleScores,
    Scorer,
    StepMetrics,
    TokenScorer,
    TopTokenScorer,
    TrainerBackend,
    ValueMetrics,
)
from relax_events.training.backend.state import StateShard, StateSource, TrainerState
from relax_events.training.ranks import DataRanks, Ranks
from relax_events.weights import Weights

__all__ = [
    "Coordinates",
    "Critic",
    "DataRanks",
    "LoRAConfig",
    "MediaConfig",
    "ModelConfig",
    "OffloadingBackend",
    "Ranks",
    "RunConfig",
    "SampleScores",
    "Scorer",
    "StateShard",
    "StateSource",
    "StepMetrics",
    "TokenScorer",
    "TopTokenScorer",
    "Topology",
    "TrainerBackend",
    "TrainerConfig",
    "TrainerState",
    "ValueMetrics",
    "Weights",
]
