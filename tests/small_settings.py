"""Settings of test runs for keys that a real run derives: models are tiny, and one thread computes
the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_events.config import RunConfig
from relax_events.config.unset_keys import missing_keys, with_values

SMALL: Mapping[str, Any] = {
    "trainer.learning_rate": 1e-3,
    "trainer.threads": 1,
    "trainer.max_tokens_per_micro_batch": 8192,
    "model.dtype": "float32",
    "judge.dtype": "float32",
    "judge.engine.threads": 1,
    "teacher.dtype": "float32",
    "teacher.threads": 1,
    "critic.threads": 1,
    "engine.max_context_tokens": 512,
    "engine.sampling.max_new_tokens": 32,
    "engine.threads": 1,
    "workers.drain_seconds": 20.0,
    "run.weight_update_mode": "drain",
    "run.retain_versions": 0,
}


def small_run(tree: Any) -> RunConfig:
    """Return the configuration of a run file, with small settings for the keys that it leaves out."""
    config = RunConfig.model_validate(tree)
    return with_values(config, {key: _value_of(key) for key in missing_keys(config)})


def _value_of(key: str) -> Any:
    return SMALL["teacher.dtype" if key.startswith("teachers.") else key]
