"""`relax plan`: what it prints for a model of which only the sizes are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_events.cli.plan import plan

pytestmark = pytest.mark.unit
QWEN3_4B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40_960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}
"""Of the `config.json` that Qwen publishes with Qwen3-4B."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Write a run file whose model has no weights here."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_4B))
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nid = "planned"\n[model]\npath = "{tmp_path}/model"\n'
        '[data]\nsource = "jsonl:rows"\n[broker]\npartitions_per_version = 8\n'
    )
    return file


def test_too_small_device_ends_with_the_change_that_fits(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(run_file, devices="1xH100-80GB") == 6
    printed = capsys.readouterr().out
    assert "4.02 B parameters" in printed
    assert "TOO MUCH" in printed
    assert "It does not fit: set trainer.activation_checkpointing = 'whole'" in printed


def test_devices_that_hold_the_same_are_one_row(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sharded = ("trainer.ranks=4", "trainer.sharding=full", "trainer.activation_checkpointing=whole")
    assert plan(run_file, *sharded, devices="8xH100-80GB") == 0
    printed = capsys.readouterr().out
    assert "0 to 3  trainer-0 to trainer-3" in printed
    assert "no worker computes on device" in printed
    assert "most of it is" in printed


def test_json_has_every_part(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run_file, devices="MyCard-200GB", output="json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["fits"], tree["num_devices"], tree["seconds"]) == (True, 1, None)
    workers = tree["devices"][0]["workers"]
    assert workers["trainer-0"]["optimizer"] == 8 * 4_022_468_096
    assert tree["devices"][0]["needed"] == sum(sum(parts.values()) for parts in workers.values())


def test_optimizer_on_the_hosts_is_counted_there(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = "trainer.activation_checkpointing=whole"
    assert plan(run_file, whole, "trainer.offload_optimizer=true", devices="2xH100-80GB") == 0
    printed = capsys.readouterr().out
    # 4.022 B parameters of 16 bytes
    assert "take 64.4 GB of the memory of their hosts (trainer.offload_optimizer)" in printed
    assert "the copy of a version takes 8.0 GB of the memory of the host" in printed


def test_optimizer_without_state_takes_none(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = "trainer.activation_checkpointing=whole"
    plan(run_file, whole, "trainer.optimizer=sgd", devices="2xH100-80GB", output="json")
    planned = json.loads(capsys.readouterr().out)
    parts = planned["devices"][0]["workers"]["trainer-0"]
    assert (parts["optimizer"], planned["host_bytes"]) == (0, 0)


def test_longest_episode_of_a_program_is_planned(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        'environment.command=["true"]',
        "environment.max_turns=40",
        "engine.max_context_tokens=16000",
        "trainer.max_tokens_per_micro_batch=16384",
    )
    assert plan(run_file, *settings, devices="MyCard-900GB") == 0
    printed = capsys.readouterr().out
    assert (
        "an episode of up to 40 paths of 16,000 tokens (environment.max_turns, "
        "engine.max_context_tokens) is trained in 40 passes of at most 16,384 tokens; its arrays "
        "take at most 18.6 MB of host memory"
    ) in printed
