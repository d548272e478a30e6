"""Models leave the memory of their process and come back, and processes take turns on a device."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_requests import finish, make_engine, make_request, other_weights, step

from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import EnvironmentProblem, WeightsError
from relax_events.models.adapters import published_parameters
from relax_events.models.offload import Offload
from relax_events.runtime.device_turn import DeviceTurn
from relax_events.runtime.resident_memory import resident_bytes
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.ranks import SingleRank
from relax_events.weights import Weights
from tests.unit.trainer_samples import make_samples, run_config

MIB = 2**20
SECONDS = 100.0
HOLDER = """
import sys
from pathlib import Path
from relax_events.runtime.device_turn import DeviceTurn

turn = DeviceTurn(Path(sys.argv[1]), alone=True)
assert turn.wait(100)
print("begun", flush=True)
sys.stdin.read()
"""
HOLDER_WITH_CHILD = """
import subprocess
import sys
from pathlib import Path
from relax_events.runtime.device_turn import DeviceTurn, turn_files

turn = DeviceTurn(Path(sys.argv[1]), alone=False)
assert turn.wait(100)
command = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(command, pass_fds=turn_files())
turn.end()
assert turn.wait(100)
print(child.pid, flush=True)  # not before: until here no process has the turn
sys.stdin.read()
"""


def loaded_tensors(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    """Return the engine's weights by name."""
    return {name: one.detach() for name, one in published_parameters(engine._model._module).items()}


def largest(engine: TransformersEngine) -> torch.Tensor:
    """Return the middle of the engine's largest tensor: whole pages."""
    tensor = max(loaded_tensors(engine).values(), key=torch.numel).flatten()
    return tensor[2048:-2048]


def test_memory_leaves_the_process_and_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(48 * MIB, generator=generator)
    small = [torch.randn(2**10, generator=generator) for _ in range(10_000)]
    view, gone = large[1000:2000], torch.ones(16 * MIB)
    expected, expected_small = large.clone(), [one.clone() for one in small]
    full = resident_bytes()
    offload = Offload(tmp_path / "devices")
    moved = offload.move_away([large, view, *small], dropped=[gone])
    assert 0.99 * (large.nbytes + gone.nbytes) < moved
    assert full - resident_bytes() > 0.95 * moved
    assert offload.move_away([large]) == 0, "it is away already"
    offload.bring_back()
    assert resident_bytes() > full - 0.4 * moved, "what was dropped is not touched yet"
    assert torch.equal(large, expected)
    assert torch.equal(view, expected[1000:2000])
    assert all(map(torch.equal, small, expected_small))
    gone.fill_(2.0)
    large[1500] = 7.0
    assert view[500] == 7.0
    assert list((tmp_path / "devices").iterdir()) == [], "the file has no name"


def test_memory_stays_where_it_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    values = torch.arange(5)
    with pytest.raises(EnvironmentProblem, match="make room there"):
        Offload(tmp_path / "file").move_away([values])
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_memory_comes_back_also_where_others_look_at_it(tmp_path: Path) -> None:
    """A numpy view, or a mapped file with changes of our own, has addresses that must not change."""
    path = tmp_path / "values"
    path.write_bytes(torch.arange(4096, dtype=torch.float32).numpy().tobytes())
    mapped = torch.from_file(str(path), size=4096)
    mapped[3] = 5.0
    seen = torch.arange(8192)
    array = seen.numpy()
    offload = Offload(tmp_path)
    assert offload.move_away([mapped, seen]) > 0
    assert seen.count_nonzero() < 8191, "its pages are gone"
    offload.bring_back()
    assert mapped.tolist() == [0, 1, 2, 5, *range(4, 4096)]
    assert array.tolist() == list(range(8192))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trainer", [{}, {"num_mini_batches": 2, "num_epochs": 2}])
def test_training_is_the_same_with_the_model_away_in_between(
    dtype: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    config = run_config(dtype=dtype, trainer=trainer)
    own = config.model_copy(
        update={
            "devices": config.devices.model_copy(update={"time_share": True}),
            "run": config.run.model_copy(update={"directory": tmp_path}),
        }
    )
    stays, leaves = (TorchBackend(one, ranks=SingleRank()) for one in (config, own))
    samples = make_samples(8, seed=4)
    for number in range(3):
        for backend in (stays, leaves):
            for first in (0, 4):
                backend.accumulate(samples[first : first + 4])
                if backend is leaves and number == 1:  # in the middle of a step
                    assert leaves.move_away() > 0
                    leaves.bring_back()
            backend.step()
        assert leaves.move_away() > 0
        leaves.bring_back()
    expected, found = stays.state().tensors, leaves.state().tensors
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_engine_without_its_weights_continues_with_the_same_tokens(tmp_path: Path) -> None:
    undisturbed, sleeper = make_engine(), make_engine()
    sleeper.offload_to(tmp_path)
    for engine in (undisturbed, sleeper):
        engine.load_weights(other_weights(1)[0])
        engine.submit(make_request(1, max_new_tokens=12))
        step(engine, 3)
    sleeper.sleep()
    sleeper.sleep()
    assert not torch.equal(largest(sleeper), largest(undisturbed)), "its pages are gone"
    sleeper.wake()
    expected, found = finish(undisturbed), finish(sleeper)
    assert {name: sample.tokens.tolist() for name, sample in found.items()} == {
        name: sample.tokens.tolist() for name, sample in expected.items()
    }


def test_sleeping_engine_loads_a_version_or_sleeps_on(tmp_path: Path) -> None:
    engine, (weights, _), (newer, _) = make_engine(), other_weights(1), other_weights(2, seed=5)
    engine.offload_to(tmp_path)
    engine.load_weights(weights)
    before = largest(engine).clone()
    engine.sleep()
    with pytest.raises(WeightsError):
        engine.load_weights(Weights(2, {}, b""))
    assert not torch.equal(largest(engine), before), "its pages are gone again"
    engine.wake()
    assert torch.equal(largest(engine), before), "the old version still serves"
    engine.sleep()
    engine.load_weights(newer)
    loaded = loaded_tensors(engine)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in newer.tensors.items())


def test_turn_passes_on_when_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "devices" / "cpu.lock"
    begun = threading.Event()
    engines = [DeviceTurn(path, alone=False) for _ in range(2)]
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "begun\n"
        assert not any(engine.ask(begun.set) for engine in engines)
        assert not engines[0].wait(0.2)
        holder.kill()
    assert all(engine.wait(SECONDS) for engine in engines), "engines have their turns together"
    assert begun.wait(SECONDS)
    trainer = DeviceTurn(path, alone=True)
    assert not trainer.wait(0.2)
    engines[0].end()
    assert not trainer.wait(0.2), "the other engine still has its turn"
    engines[1].end()
    assert trainer.wait(SECONDS)
    trainer.end()
    assert not trainer.has_begun


def test_turn_is_wanted_while_another_process_waits_to_have_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "cpu.lock"
    engine, late = (DeviceTurn(path, alone=False) for _ in range(2))
    assert not engine.is_wanted(), "it has no turn"
    assert engine.wait(SECONDS)
    assert not engine.is_wanted()
    command, pipe = [sys.executable, "-c", HOLDER, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        deadline = time.monotonic() + SECONDS
        while not engine.is_wanted():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not late.wait(0.2), "it can't overtake"
        engine.end()
        assert holder.stdout.readline() == "begun\n"
        assert not late.wait(0.2)
        holder.kill()
    assert late.wait(SECONDS)
    assert not late.is_wanted()
    assert engine.wait(SECONDS), "engines have their turns together"


def test_turn_is_not_wanted_by_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "cpu.lock"
    engine = DeviceTurn(path, alone=False)
    assert engine.wait(SECONDS)
    command, pipe = [sys.executable, "-c", HOLDER, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        deadline = time.monotonic() + SECONDS
        while not engine.is_wanted():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        holder.kill()
    assert not engine.is_wanted()


def test_turn_lasts_as_long_as_a_child_that_has_its_file(tmp_path: Path) -> None:
    """An engine's server outlives a killed worker by a moment, with its memory."""
    path = tmp_path / "cpu.lock"
    command = [sys.executable, "-c", HOLDER_WITH_CHILD, str(path)]
    pipe = subprocess.PIPE
    trainer = DeviceTurn(path, alone=True)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        child = psutil.Process(int(holder.stdout.readline()))
        holder.kill()
    assert not trainer.wait(0.2)
    child.kill()
    assert trainer.wait(SECONDS)
