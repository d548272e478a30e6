"""The recipes among the run files: those that name the devices that they are planned for. What
tests of them share: published shapes of their models, and rows of their datasets' columns.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet

from tests.unit.image_model import image_file
from tests.unit.video_and_audio import audio_file, video_file

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
TINY_FAMILIES = {
    "Qwen3-4B": "qwen3",
    "Qwen3-30B-A3B": "qwen3_moe",
    "Qwen3-VL-4B-Instruct": "qwen3_vl",
    "Qwen3-Omni-30B-A3B-Instruct": "qwen3_omni_moe_thinker",
}

MEDIA: dict[str, Callable[[int], bytes]] = {
    "image": lambda seed: image_file(64, 48, seed=seed),
    "audio": lambda seed: audio_file(0.5, seed=seed),
    "video": lambda seed: video_file(32, 32, seed=seed),
}


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


def write_dataset(recipe: dict[str, Any], folder: Path, *, num_rows: int = 4) -> dict[str, Any]:
    """Write rows with the columns that a recipe reads; return the keys of `data` that name them."""
    read = recipe["data"]
    media = read.get("multimodal_keys", {})
    rows = [_row(index, media, folder) for index in range(num_rows)]
    if read["source"].startswith("parquet:"):
        (folder / "rows").mkdir()
        pa.parquet.write_table(
            pa.Table.from_pylist(rows), folder / "rows" / "train-00000-of-00001.parquet"
        )
        return {"source": f"parquet:{folder / 'rows'}"}
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    rooted = {"media_root": str(folder)} if "media_root" in read else {}
    return {"source": f"jsonl:{folder / 'rows.jsonl'}"} | rooted


def _row(index: int, media: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return a row of mathematics, or of a question with lettered answers about its media."""
    if not media:
        asked = f"Solve it. The last line is Answer: $Answer. What is {index} times 7?"
        return {"prompt": [{"role": "user", "content": asked}], "label": str(7 * index)}
    content = {modality: MEDIA[modality](index) for modality in media}
    if media.get("image") == "image":
        return {
            "image": {"bytes": content["image"], "path": None},
            "problem": "What is the angle at A?\nChoices:\n(A) 30\n(B) 60",
            "solution": "<answer>B</answer>",
            "original_answer": "The answer is B",
        }
    for modality, data in content.items():
        (folder / f"{index}.{modality}").write_bytes(data)
    return {
        "problem": "What is it?",
        "options": ["A. rain", "B. a motorboat"],
        "solution": "<answer>B</answer>",
        "path": {modality: f"{index}.{modality}" for modality in content},
        "data_source": "twin",
    }


def make_twin(name: str, folder: Path, *, run_id: str, bootstrap_servers: str) -> dict[str, Any]:
    """Return a recipe with a tiny model of its family and two steps of two prompts on rows of its
    dataset's columns, and nothing else changed but the sizes that follow from them.
    """
    recipe = read_recipe(name)
    family = TINY_FAMILIES[Path(recipe["model"]["path"]).name]
    model = str(folder / "model")
    small = {"name": "transformers", "max_context_tokens": 1536, "threads": 1}
    data = write_dataset(recipe, folder)
    overlay: dict[str, Any] = {
        "run": {"id": run_id, "num_steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2},
        "model": {
            "path": model,
            "dtype": "float32",
            "tiny": {"family": family, "hidden_size": 32, "num_layers": 1, "corpus_rows": 8},
        },
        "data": data | {"max_prompt_tokens": 1500},
        "engine": small | {"sampling": {"max_new_tokens": 8}},
        "trainer": {
            "ranks": 1,
            "sharding": "none",
            "max_tokens_per_micro_batch": 4096,
            "threads": 1,
        },
        "broker": {"bootstrap_servers": bootstrap_servers, "partitions_per_version": 2},
        "workers": {"rollout": 1},
    }
    if recipe["trainer"].get("backend") == "megatron":
        divided = {"ranks": 2, "tensor_parallel": 1, "expert_parallel": 2}
        overlay["trainer"] = divided | {"max_tokens_per_micro_batch": 4096, "threads": 1}
    if "multimodal_keys" in recipe["data"]:
        tokens = {"image_max_token_num": 16, "video_min_token_num": 4, "video_max_token_num": 16}
        overlay["model"]["media"] = tokens
    if "judge" in recipe:
        engine = small | {"sampling": {"max_new_tokens": 8}}
        overlay["judge"] = {"model_path": model, "dtype": "float32", "engine": engine}
    if "teacher" in recipe:
        overlay["teacher"] = {"model_path": model, "dtype": "float32"}
    twin = merge(recipe, overlay)
    for dataset in twin.get("evaluation", {}).get("datasets", []):
        dataset |= data
        dataset["sampling"]["max_new_tokens"] = 8
    return twin


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a run file with another laid over it."""
    return one | {
        key: merge(one[key], value)
        if isinstance(value, dict) and isinstance(one.get(key), dict)
        else value
        for key, value in other.items()
    }
