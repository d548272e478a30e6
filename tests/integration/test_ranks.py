"""Two ranks under torchrun against one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from relax_events.events.types import CheckpointRef
from relax_events.models.tiny import make_tiny
from relax_events.objects import ObjectStore
from relax_events.training.checkpoints import Checkpoints
from relax_events.training.ranks import SingleRank

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), corpus=["12=21"], hidden_size=32, seed=3)


@pytest.fixture
def folder(tmp_path, model_path):
    (tmp_path / "model").symlink_to(model_path)
    return tmp_path


def run(folder, scenario, parameter="-", *, ranks=2):
    """Run a scenario of ranks_program; return what rank 0 wrote."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks == 2 else []
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = str(ROOT / "tests" / "integration" / "ranks_program.py")
    done = subprocess.run(
        [sys.executable, *launcher, program, scenario, str(folder), parameter],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text()), safetensors.torch.load_file(folder / "tensors.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model_path):
    folder = tmp_path_factory.mktemp("alone")
    (folder / "model").symlink_to(model_path)
    return run(folder, "train", ranks=1)


@pytest.mark.parametrize("split", ["even", "uneven", "one_idle"])
def test_two_ranks_train_like_one_however_the_samples_lie(folder, alone, split):
    figures, weights = run(folder, "train", split)
    expected_figures, expected_weights = alone
    for mine, expected in zip(figures, expected_figures, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=1e-5)


def test_ranks_hear_each_other(folder):
    result, _ = run(folder, "talk")
    heard = {
        "gathered": [[[0, 10]], [[1, 10]]],
        "floats": [[0.5], [1.5]],
        "bytes": ["", "00ff"],
        "empty": ["", ""],
        "broadcast": "abc",
        "broadcast_empty": "",
    }
    assert result == [heard, heard]


def test_divergence_on_one_rank_stops_both_with_the_same_text(folder):
    (first, second, num_samples), _ = run(folder, "diverge")
    assert first == second
    assert "train step 0: loss and gradients must be finite; rank 1: loss" in first
    assert "micro-batch of samples s3." in first
    assert num_samples == 8


def test_checkpoint_of_two_ranks_is_restored_on_one(folder):
    (first, second), tensors = run(folder, "save")
    assert first == second
    version, uri, digest = first.split()
    store = ObjectStore.open((folder / "objects").as_uri())
    with Checkpoints(store, ranks=SingleRank(), keep=1) as checkpoints:
        restored = checkpoints.load(CheckpointRef(int(version), uri, bytes.fromhex(digest)))
    assert len([key for key in store.list("checkpoints/") if key.endswith("of-00002.safetensors")]) == 2
    assert restored.extra == {"rank": 0}
    assert restored.state.tensors.keys() == tensors.keys()
    assert all(torch.equal(restored.state.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_lost_rank_is_an_error_on_the_other(folder):
    result, _ = run(folder, "lose_a_rank")
    assert "rank 0 of 2: all_gather failed, another rank died or is behind" in result
    assert "see its log" in result
