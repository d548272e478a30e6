"""The smallest run whose parts are attacked, and the tiny models that some of them need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_events.config import RunConfig
from relax_events.config.unset_keys import missing_keys, with_values

UNSET: dict[str, Any] = {
    "trainer.learning_rate": 1e-3,
    "trainer.threads": 1,
    "trainer.max_tokens_per_micro_batch": 1024,
    "critic.threads": 1,
    "model.dtype": "float32",
    "engine.max_context_tokens": 512,
    "engine.sampling.max_new_tokens": 32,
    "engine.threads": 1,
    "workers.drain_seconds": 20.0,
    "run.weight_update_mode": "drain",
    "run.retain_versions": 0,
}
"""Values for keys that a real run derives from its model."""
CORPUS = ("read the file", "12=21")


def build_attacked_run(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run in a folder, with these sections."""
    tree: dict[str, Any] = {
        "run": {"id": "attacked", "directory": folder},
        "model": {"path": folder / "model", "device": "cpu"},
        "data": {"source": "jsonl:unused"},
        **sections,
    }
    config = RunConfig.model_validate(tree)
    return with_values(config, {key: UNSET[key] for key in missing_keys(config)})


def build_tiny_model(folder: Path) -> Path:
    """Write a tiny random model with a tokenizer, and return its folder."""
    from relax_events.packages.examples.tiny_models import make_tiny

    return make_tiny(folder, corpus=CORPUS, hidden_size=32, num_layers=1)
