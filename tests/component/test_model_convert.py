"""`relax models export --format` writes a checkpoint of megatron-core and the same folder again. Each command
is a process of its own, because megatron-core on the CPU replaces functions of torch."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from relax_events.packages.examples.tiny_models import make_tiny

pytestmark = [pytest.mark.component, pytest.mark.long, pytest.mark.timeout(900)]

FAMILIES = ["qwen3", "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe_thinker"]


def relax(*arguments):
    """Run a command; return its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "relax_events.cli", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def link_files(folder, blobs):
    """Keep the files of a model elsewhere, as the cache of the Hugging Face hub does."""
    for file in list(folder.iterdir()):
        blob = blobs / folder.name / file.name
        blob.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        file.symlink_to(blob)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_there_and_back_gives_the_same_bits(tmp_path, family):
    source, middle, target, base = (
        tmp_path / name for name in ("source", "middle", "target", "base")
    )
    for folder, seed in ((source, 3), (base, 4)):
        make_tiny(folder, corpus=["12=21"], family=family, phrases=["ab"], seed=seed)
        link_files(folder, tmp_path / "blobs")
    code, stdout, stderr = relax(
        "models", "export", source, "--to", middle, "--format", "megatron", "--output", "json"
    )
    assert code == 0, stderr
    weights = load_file(source / "model.safetensors")
    num_bytes = sum(one.nbytes for one in weights.values())
    assert json.loads(stdout)["num_bytes"] == num_bytes
    assert (middle / "metadata.json").is_file()
    code, _, stderr = relax(
        "models", "export", middle, "--to", target, "--format", "hf", "--base", base
    )
    assert code == 0, stderr
    again = load_file(target / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], one) for name, one in weights.items())
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_folder_that_is_no_checkpoint_is_refused(tmp_path):
    make_tiny(tmp_path / "model", corpus=["12=21"])
    code, _, stderr = relax(
        "models", "export", tmp_path / "model", "--to", tmp_path / "new", "--format", "hf",
        "--base", tmp_path / "model",
    )  # fmt: skip
    assert code == 2
    assert "holds no metadata.json" in stderr
    assert not (tmp_path / "new").exists()


HOSTILE = {
    "put_code": "is no tensor as torch saves it",
    "put_code_as_bytes": "",
    "pack_embedding": "and unpacks to",
    "end_early": "ends before the entry of",
    "lose_bytes": "lacks the bytes of",
    "put_code_in_metadata": "it names os.system, and only the classes of torch's own metadata",
    "put_code_in_metadata_of_a_rank": ".metadata can't be read: ",
    "link_out": "__0_0.distcp is a link or a special file",
    "put_pipe": ".metadata is a link or a special file",
    "name_other_format": "only checkpoints with",
    "break_config": "metadata.json can't be read",
}
"""Of each hostile checkpoint, a part of its error."""


def test_hostile_checkpoint_is_refused_and_runs_nothing(tmp_path):
    source, good, canary = tmp_path / "source", tmp_path / "good", tmp_path / "canary"
    make_tiny(source, corpus=["12=21"])
    code, _, stderr = relax("models", "export", source, "--to", good, "--format", "megatron")
    assert code == 0, stderr
    (tmp_path / "copies").mkdir()
    arguments = map(str, (good, source, tmp_path / "copies", canary))
    done = subprocess.run(
        [sys.executable, "-m", "tests.foreign_checkpoints", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    errors = json.loads(done.stdout.splitlines()[-1])
    assert {name: text for name, text in HOSTILE.items() if text not in errors.get(name, "")} == {}
    assert errors.keys() == HOSTILE.keys()  # common.pt alone is left unread
    assert not canary.exists()
    # A conversion reads nothing of common.pt, so code there does not matter.
    again = load_file(tmp_path / "copies" / "put_code_in_common-to" / "model.safetensors")
    weights = load_file(source / "model.safetensors")
    assert all(torch.equal(again[name], one) for name, one in weights.items())
