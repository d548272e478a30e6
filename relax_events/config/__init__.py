"""What a run is: one TOML file, checked by pydantic, with flags and environment on top. Imports neither torch nor Kafka."""

from relax_events.config.loading import load_run_config
from relax_events.config.sections import (
    AlgorithmConfig,
    BrokerConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectsConfig,
    RewardConfig,
    RunConfig,
    RunSection,
    SamplingConfig,
    SourceSection,
    TelemetryConfig,
    TrainerConfig,
    WarmStartConfig,
    WorkersConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BrokerConfig",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "ObjectsConfig",
    "RewardConfig",
    "RunConfig",
    "RunSection",
    "SamplingConfig",
    "SourceSection",
    "TelemetryConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "WorkersConfig",
    "load_run_config",
]
