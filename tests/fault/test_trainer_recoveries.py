"""Faults that a trainer survives: an unreadable checkpoint, a sample that it can't compute, and
nondeterministic kernels.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import FaultRun, assert_ledger_balances

from relax_events.events.sample_columns import split_samples

STEPS = 8
REFUSED = "000001-0001-0"
REFUSES = f"""
from relax_events.errors import PoisonSample
from relax_events.training.backend.torch_backend import TorchBackend


class Refusing(TorchBackend):
    def accumulate(self, samples):
        if found := [sample.sample_id for sample in samples if sample.prompt_group_id == "{REFUSED}"]:
            raise PoisonSample(f"sample {{found[0]}} can't be computed")
        super().accumulate(samples)
"""
NEVER_REPEATS = """
import os
from pathlib import Path

import numpy as np
import torch

from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_backend import TorchBackend

FOLDER = Path(__file__).parent


class NeverRepeating(TorchBackend):
    '''Adds to every master weight what another order of additions would: a few of float32's last bits, others in each process.'''

    def step(self):
        metrics = super().step()
        noise, state = torch.Generator().manual_seed(os.getpid()), self.state()
        tensors = {
            name: tensor * (1 + 1e-6 * torch.rand(tensor.shape, generator=noise)) if name.startswith("model.") else tensor
            for name, tensor in state.tensors.items()
        }
        super().load_state(TrainerState(policy_version=state.policy_version, tensors=tensors))
        self._keep(f"stepped-{os.getpid()}-{self.policy_version}")
        return metrics

    def load_state(self, state):
        super().load_state(state)
        self._keep(f"loaded-{os.getpid()}-{self.policy_version}")

    def _keep(self, name):
        tensors = {key: value.float().numpy() for key, value in self.state().tensors.items() if key.startswith("model.")}
        np.savez(FOLDER / f"{name}.tmp.npz", **tensors)
        (FOLDER / f"{name}.tmp.npz").rename(FOLDER / f"{name}.npz")
"""


def own_backend(folder: Path, code: str, name: str) -> dict[str, str]:
    (folder / "own_backend.py").write_text(code)
    return {"backend": f"{folder / 'own_backend.py'}:{name}"}


@pytest.mark.long
def test_trainer_takes_an_older_checkpoint_where_the_newest_is_unreadable(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(
        run={"num_steps": STEPS}, trainer={"checkpoint_every": 2, "keep_checkpoints": 2}
    )
    process = run.start()

    def checkpoints() -> list[int]:
        return sorted(
            {
                step.checkpoint.policy_version
                for step in run.state.steps
                if step.checkpoint is not None
            }
        )

    run.wait_until(lambda: len(checkpoints()) >= 2, "two checkpoints are named")
    process.send_signal(signal.SIGTERM)
    run.wait_until_ended(process)
    run.follow_for(1.0)
    older, newest = checkpoints()[-2:]
    shards = list((run.objects / "checkpoints" / f"{newest:08d}").rglob("*.safetensors"))
    assert shards
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-1])
    assert run.wait_until_ended(run.start()) == 0, run.output.read_text()
    assert_ledger_balances(run)
    (unreadable,) = run.logged("trainer-0", "checkpoint.read_failed")
    assert unreadable["policy_version"] == newest
    assert run.logged("trainer-0", "checkpoint.loaded")[-1]["policy_version"] == older
    assert all(line["identical"] for line in run.logged("trainer-0", "train_steps.replayed"))


@pytest.mark.long
def test_sample_that_the_trainer_can_not_compute_fails_its_prompt_group_only(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    run = start_run(run={"num_steps": 4}, trainer=own_backend(tmp_path, REFUSES, "Refusing"))
    assert run.wait_until_ended(run.start()) == 0
    run.follow_for(1.0)
    ledger = assert_ledger_balances(run)
    assert ledger["outcomes"]["failed"] == 1
    ((name, reason),) = run.failures.items()
    assert name == REFUSED
    assert reason.startswith(f"poison: sample {REFUSED}/")
    assert reason.endswith("can't be computed")
    assert len(run.logged("trainer-0", "worker.started")) == 1
    (dead_letter,) = run.records("trainer.dead-letters")
    assert dead_letter.key == REFUSED
    assert len(split_samples(run.decode(dead_letter))) == run.config.run.samples_per_prompt


@pytest.mark.long
def test_master_weights_survive_a_trainer_with_nondeterministic_kernels(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    backend = own_backend(tmp_path, NEVER_REPEATS, "NeverRepeating")
    run = start_run(
        run={"num_steps": 6}, model={"dtype": "bfloat16"}, trainer={"checkpoint_every": 3} | backend
    )
    run.arm("trainer.after_commit:5=kill")
    assert run.wait_until_ended(run.start()) == 0
    assert_ledger_balances(run)
    (diverged,) = run.logged("trainer-0", "replay.diverged")
    version = diverged["policy_version"]
    first = min(tmp_path.glob(f"stepped-*-{version}.npz"), key=lambda path: path.stat().st_mtime_ns)
    (second,) = tmp_path.glob(f"loaded-*-{version}.npz")
    assert first.name.split("-")[1] != second.name.split("-")[1]
    before, after = np.load(first), np.load(second)
    num_weights = num_coarse = 0
    for name in before.files:
        one, other = before[name], after[name]
        assert np.all(np.abs(one - other) <= 2.0**-7 * np.abs(one) + 1e-12), (
            name
        )  # both round to the published value
        num_weights += other.size
        num_coarse += int(np.sum((other.view(np.uint32) & 0xFFFF) == 0))
    assert num_coarse < 0.05 * num_weights, (
        "the master weights have become those that were published"
    )
    assert diverged["num_moved"] < 0.05 * diverged["num_weights"]
