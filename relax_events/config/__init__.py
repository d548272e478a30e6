"""What a run is: one TOML file, checked by pydantic, with flags and environment on top. Imports
neither torch nor Kafka.
"""

from relax_events.config.algorithm import AlgorithmConfig
from relax_events.config.broker import BrokerConfig, ObjectsConfig
from relax_events.config.data import DataConfig, DatasetConfig, RowsConfig
from relax_events.config.engine import EngineConfig, ModelConfig, SamplingConfig, SGLangConfig
from relax_events.config.environment import EnvironmentConfig
from relax_events.config.evaluation import EvaluationConfig, EvaluationDatasetConfig
from relax_events.config.http import HttpConfig
from relax_events.config.judge import JudgeConfig
from relax_events.config.loading import load_run_config
from relax_events.config.lora import LoRAConfig
from relax_events.config.media import MediaConfig
from relax_events.config.reward import ChosenReward, RewardConfig
from relax_events.config.run_config import (
    HealthConfig,
    ParentSection,
    RunConfig,
    RunSection,
    TelemetryConfig,
    WorkersConfig,
)
from relax_events.config.scaling import AutoscalerConfig, ScalingConfig
from relax_events.config.teacher import SourceTeacherConfig, TeacherConfig, TeacherModelConfig
from relax_events.config.tracing import TracesConfig
from relax_events.config.training import CriticConfig, SftWarmupConfig, TrainerConfig
from relax_events.config.weights import WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "AutoscalerConfig",
    "BrokerConfig",
    "ChosenReward",
    "CriticConfig",
    "DataConfig",
    "DatasetConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "EvaluationDatasetConfig",
    "HealthConfig",
    "HttpConfig",
    "JudgeConfig",
    "LoRAConfig",
    "MediaConfig",
    "ModelConfig",
    "ObjectsConfig",
    "ParentSection",
    "RewardConfig",
    "RowsConfig",
    "RunConfig",
    "RunSection",
    "SGLangConfig",
    "SamplingConfig",
    "ScalingConfig",
    "SftWarmupConfig",
    "SourceTeacherConfig",
    "TeacherConfig",
    "TeacherModelConfig",
    "TelemetryConfig",
    "TracesConfig",
    "TrainerConfig",
    "WeightsConfig",
    "WorkersConfig",
    "load_run_config",
]
