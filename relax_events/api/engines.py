"""The contract of rollout engines, and what they are given."""

from relax_events.config import EngineConfig, RunConfig, SamplingConfig
from relax_events.engines.protocol import (
    Engine,
    EngineUsage,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.weights import Weights

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineUsage",
    "EnvironmentContext",
    "GeneratedSample",
    "GenerationRequest",
    "ProcessedMedia",
    "RunConfig",
    "SampleRequest",
    "SamplingConfig",
    "Weights",
]
