"""The recipes among the run files: those that name the devices that they are planned for. What
tests of them share: the published shapes of their models.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import orjson

CONFIGS = Path(__file__).parents[1] / "configs"
PLANNED = re.compile(r"^# +relax plan configs/(\S+)\.toml --devices (\S+)$", re.MULTILINE)
TEXT_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
TEXT_30B = TEXT_4B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
VISION_4B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2560,
    "deepstack_visual_indexes": [5, 11, 17],
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {"model_type": "qwen3"} | TEXT_4B,
    "Qwen3-4B-Instruct-2507": {"model_type": "qwen3"} | TEXT_4B,
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe"} | TEXT_30B,
    "Qwen3-VL-4B-Instruct": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "text_config": {"model_type": "qwen3_vl_text"} | TEXT_4B,
        "vision_config": {"model_type": "qwen3_vl"} | VISION_4B,
    },
    "Qwen3-Omni-30B-A3B-Instruct": {"model_type": "qwen3_moe"} | TEXT_30B,
}
"""What the published `config.json` of a model says of its sizes; of Omni its language model."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
}
"""What the published `preprocessor_config.json` of Qwen3-VL says."""


def planned_devices(name: str) -> str:
    """Return the devices that a run file says it is planned for; empty where it is no recipe."""
    found = PLANNED.search((CONFIGS / f"{name}.toml").read_text())
    return found[2] if found and found[1] == name else ""


RECIPES = sorted(path.stem for path in CONFIGS.glob("*.toml") if planned_devices(path.stem))


def read_recipe(name: str) -> dict[str, Any]:
    """Read a recipe as it stands."""
    return tomllib.loads((CONFIGS / f"{name}.toml").read_text())


def write_models(recipe: dict[str, Any], folder: Path) -> list[str]:
    """Write folders with the published shapes of a recipe's models; return the overrides that name
    them.
    """
    paths = {"model.path": recipe["model"]["path"]}
    paths |= {
        f"{section}.model_path": recipe[section]["model_path"]
        for section in ("judge", "teacher")
        if section in recipe
    }
    for path in paths.values():
        model = folder / Path(path).name
        model.mkdir(exist_ok=True)
        shapes = SHAPES[model.name] | {"dtype": "bfloat16"}
        (model / "config.json").write_bytes(orjson.dumps(shapes))
        (model / "preprocessor_config.json").write_bytes(orjson.dumps(PROCESSOR))
    return [f"{key}={folder / Path(path).name}" for key, path in paths.items()]
