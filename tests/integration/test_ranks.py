"""Two ranks under torchrun against one. torchrun takes some ten seconds to start, so one start runs
all scenarios."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_events.events.parts import CheckpointRef
from relax_events.objects import ObjectStore
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.ranks import SingleRank
from tests.integration.ranks_program import PLAIN, SPLITS, WHOLE_STEP, train

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run ranks_program once; the folder holds its model, objects, tensors and results."""
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny(folder / "model", corpus=["12=21"], hidden_size=32, seed=3)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(
            tmp_path_factory.mktemp("launcher")
        ),  # torchrun leaves its logs in the temporary folder, and ranks that it ends their models
    }
    command = [*LAUNCHER, str(ROOT / "tests" / "integration" / "ranks_program.py"), str(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def alone(folder):
    algorithms = {"": PLAIN, "_whole": WHOLE_STEP}
    return {
        name: train(SingleRank(), folder / "model", (0.0, 1.0), algorithm)
        for name, algorithm in algorithms.items()
    }


@pytest.mark.parametrize("algorithm", ["", "_whole"])
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_train_like_one_for_any_split_of_samples(
    folder, results, alone, split, algorithm
):
    expected_metrics, expected_weights = alone[algorithm]
    split += algorithm
    assert not algorithm or 0 < expected_metrics[0]["masked_fraction"] < 1
    for reason in ("num_rejected_by_veto", "num_rejected_by_divergence"):
        assert not algorithm or 0 < expected_metrics[0][reason] < expected_metrics[0]["num_samples"]
    for mine, expected in zip(results[split], expected_metrics, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for name, value in load_file(folder / f"{split}.safetensors").items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=1e-5)


def test_ranks_exchange_values_and_bytes(results):
    received = {
        "gathered": [[[0, 10]], [[1, 10]]],
        "floats": [[0.5], [1.5]],
        "bytes": ["", "00ff"],
        "empty": ["", ""],
        "broadcast": "abc",
        "broadcast_empty": "",
    }
    assert results["collectives"] == [received, received]


def test_non_finite_loss_on_one_rank_stops_both_with_the_same_error(results):
    (first, second), num_samples = results["diverge"]
    assert first == second
    assert "train step 0: loss and gradients must be finite; rank 1: loss" in first
    assert "micro-batch of samples s3." in first
    assert num_samples == 8


def test_checkpoint_of_two_ranks_is_restored_on_one(folder, results):
    first, second = results["save"]
    assert first == second
    version, uri, digest = first.split()
    store = ObjectStore.open((folder / "objects").as_uri())
    with Checkpoints(store, ranks=SingleRank(), keep=1) as checkpoints:
        restored = checkpoints.load(CheckpointRef(int(version), uri, bytes.fromhex(digest)))
    assert (
        len([key for key in store.list("checkpoints/") if key.endswith("of-00002.safetensors")])
        == 2
    )
    assert restored.extra == {"rank": 0}
    expected = load_file(folder / "save.safetensors")
    assert restored.state.tensors.keys() == expected.keys()
    assert all(
        torch.equal(restored.state.tensors[name], tensor) for name, tensor in expected.items()
    )


def test_a_lost_rank_is_an_error_on_the_other(results):
    assert (
        "rank 0 of 2: all_gather failed, another rank died or is behind" in results["lose_a_rank"]
    )
    assert "see its log" in results["lose_a_rank"]
