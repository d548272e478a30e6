"""The model card: lineage, licence, curve and evaluations; hostile text stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import small_run
from transformers import GenerationConfig

from relax_events.config import RunConfig
from relax_events.events.types import PolicyEvaluated
from relax_events.ops.model_export.base_folder import (
    BaseModel,
    copy_small_files,
    read_base_model,
    set_dtype,
)
from relax_events.ops.model_export.card import Lineage, render_card, without_local_folders
from relax_events.projections.run_state import RunState
from relax_events.runtime.run_description import build_run_description, digest_config
from tests.unit.run_events import train_step

BASE = BaseModel("Qwen/Qwen3-0.6B", True, "apache-2.0", "ab" * 32, "qwen3", False)
HOSTILE = "jsonl:a|b`<script>\n# head"


def run_config(**sections: Any) -> RunConfig:
    return small_run(
        {
            "run": {"id": "shown", "num_steps": 40},
            "model": {"path": "/home/me/secret-place/model"},
            "data": {"source": "jsonl:rows"},
            "objects": {"uri": "s3://private-bucket/x"},
            **sections,
        }
    )


def card_of(
    config: RunConfig | None = None,
    *,
    version: int = 40,
    num_steps: int = 40,
    base: BaseModel = BASE,
    evaluations: tuple[PolicyEvaluated, ...] = (),
) -> str:
    config = config or run_config()
    state = RunState(keeps_all=True)
    state.apply(build_run_description(config))
    for step in range(num_steps):
        state.apply(train_step(step, at_seconds=60.0 * step, reward_mean=step / 100))
    for event in evaluations:
        state.apply(event)
    return render_card(Lineage(config, version, b"\x01" * 32, "weights", base, state))


def front_matter(card: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return tree


def rows_of(card: str, section: str) -> list[list[str]]:
    text = card.split(f"## {section}\n\n")[1].split("\n\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_card_states_the_lineage() -> None:
    config = run_config()
    lineage = dict(rows_of(card_of(config), "Lineage")[2:])
    assert lineage["run"] == "shown"
    assert lineage["policy version"] == "40 of 40"
    assert lineage["weights, SHA-256"] == "01" * 32
    assert lineage["run file, SHA-256"] == digest_config(config)
    assert lineage["train steps"] == "40"
    assert lineage["trained tokens"] == "4000"
    assert lineage["trained"] == "1970-01-01 00:00 UTC to 1970-01-01 00:39 UTC"
    assert lineage["exported by"].startswith("Relax Events ")
    assert "transformers 5" in lineage["exported by"]


def test_card_names_base_and_licence_for_the_hub() -> None:
    tree = front_matter(card_of())
    assert (tree["license"], tree["base_model"]) == ("apache-2.0", "Qwen/Qwen3-0.6B")
    assert (tree["library_name"], tree["pipeline_tag"]) == ("transformers", "text-generation")
    assert tree["tags"] == ["relax-events", "reinforcement-learning", "grpo"]
    unknown = card_of(base=BaseModel("local", False, "", "", "qwen3_vl", True))
    assert {"license", "base_model"} & front_matter(unknown).keys() == set()
    assert front_matter(unknown)["pipeline_tag"] == "image-text-to-text"
    assert "unknown: the base folder's README.md names none" in unknown


def test_curve_has_the_first_and_the_last_step_up_to_the_version() -> None:
    rows = rows_of(card_of(version=30), "Reward curve")
    assert rows[0] == ["step", "reward_mean", "loss", "kl_estimate"]
    assert (rows[2][:2], rows[-1][:2]) == (["0", "0"], ["29", "0.29"])
    assert len(rows) == 2 + 20
    assert "No train step led to this version" in card_of(version=0)


def test_evaluations_after_the_version_are_left_out() -> None:
    events = tuple(
        PolicyEvaluated(
            policy_version=version,
            dataset="gsm8k",
            num_prompts=8,
            samples_per_prompt=1,
            reward_mean=version / 100,
            pass_at_k={"1": 0.5},
            weights_digest=b"",
        )
        for version in (0, 30, 40)
    )
    rows = rows_of(card_of(version=30, evaluations=events), "Evaluations")
    assert [row[1] for row in rows[2:]] == ["0", "30"]
    assert rows[3] == ["gsm8k", "30", "8", "0.5", "0.3"]
    assert "has no evaluation" in card_of()


def test_card_holds_neither_paths_nor_the_object_store() -> None:
    card = card_of()
    assert "secret-place" not in card
    assert "private-bucket" not in card


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("jsonl:/home/me/data/rows.jsonl", "jsonl:rows.jsonl"),
        ("/home/me/reward.py:spread", "reward.py:spread"),
        ("jsonl:data/rows.jsonl", "jsonl:data/rows.jsonl"),
        ("s3://bucket/folder/rows.parquet", "s3://bucket/folder/rows.parquet"),
        ("jsonl:file:///home/me/a.jsonl, math", "jsonl:a.jsonl, math"),
        ("0 to 40, 4 prompt groups of 4", "0 to 40, 4 prompt groups of 4"),
    ],
)
def test_folders_of_this_machine_are_left_out(setting: str, expected: str) -> None:
    assert without_local_folders(setting) == expected


def test_hostile_text_is_escaped() -> None:
    card = card_of(run_config(data={"source": HOSTILE}))
    assert rows_of(card, "Data")[2] == ["jsonl:a\\|b\\`\\<script\\> # head", "1"]
    hostile = BaseModel('x"\ny: [', True, "a: b\n- c", "", "", False)
    tree = front_matter(card_of(base=hostile))
    assert (tree["base_model"], tree["license"]) == ('x" y: [', "a: b - c")


def test_name_and_licence_come_from_the_base_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "README.md").write_text(
        "---\nlicense: 'apache-2.0'\ntags:\n- x\n---\n# Qwen\nlicense: mit"
    )
    base = read_base_model(folder)
    assert (base.name, base.is_on_hub, base.licence) == ("Qwen/Qwen3-0.6B", True, "apache-2.0")
    assert (base.model_type, base.is_multimodal) == ("qwen3", False)
    (folder / "README.md").unlink()
    assert read_base_model(folder).licence == ""


def test_small_files_are_copied_and_code_and_other_weights_are_not(tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "target"
    kept = [
        "config.json", "generation_config.json", "tokenizer.json", "merges.txt", "LICENSE",
        "chat_template.jinja", "preprocessor_config.json", "tokenizer.model", "NOTICE.md",
    ]  # fmt: skip
    dropped = [
        "modeling_x.py", "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json",
        "README.md", ".gitattributes", "relax_events.json", "pytorch_model.bin.index.json",
    ]  # fmt: skip
    base.mkdir()
    target.mkdir()
    for name in kept + dropped:
        (base / name).write_text(name)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool.jinja").write_text("tool")
    copy_small_files(base, target)
    assert {path.name for path in target.iterdir()} == {*kept, "additional_chat_templates"}
    assert (target / "additional_chat_templates/tool.jinja").read_text() == "tool"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16", "a": 1}, {"torch_dtype": "float32", "a": 1}),
        (
            {"thinker_config": {"dtype": "bfloat16", "text_config": {"dtype": None}}},
            {
                "thinker_config": {"dtype": "float32", "text_config": {"dtype": None}},
                "dtype": "float32",
            },
        ),
    ],
)
def test_config_names_the_dtype_of_the_weights(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    set_dtype(tmp_path, "float32")
    assert json.loads((tmp_path / "config.json").read_text()) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "do_sample": False},
        {"num_beams": 1, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"eos_token_id": [1, 2], "penalty_alpha": 0.1},
    ],
)
def test_generation_settings_that_transformers_would_not_write_are_copied_as_they_are(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    base, target = tmp_path / "base", tmp_path / "target"
    base.mkdir()
    target.mkdir()
    text = json.dumps(settings, indent=1)
    (base / "generation_config.json").write_text(text)
    copy_small_files(base, target)
    assert (target / "generation_config.json").read_text() == text
    assert GenerationConfig.from_pretrained(target) is not None
