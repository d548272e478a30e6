"""Elastic workers come and go a thousand times on simulated machines: no device is lost or leaked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.launcher.device_assignment import DeviceAssignment
from relax_events.planning.placement import LOADS

pytestmark = pytest.mark.unit
MakeRunConfig = Callable[..., RunConfig]
VISIBLE = "CUDA_VISIBLE_DEVICES"
NUM_CHANGES = 1000


def gpu_of(found: DeviceAssignment, worker: tuple[str, int]) -> str:
    return found.variables(*worker)[VISIBLE]


def loads(
    found: DeviceAssignment, workers: Mapping[tuple[str, int], str], names: set[str]
) -> Counter[str]:
    """Return how much is computed on each device by these workers."""
    counted = Counter(dict.fromkeys(names, 0))
    for (role, _), name in workers.items():
        counted[name] += LOADS.get(role, 1)
    return counted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_gpus", "ranks", "workers"),
    [
        (8, 4, {"rollout": 2}),
        (16, 8, {"rollout": 4, "evaluator": 1}),
        (64, 32, {"rollout": 12, "teacher": 2}),
        (8, 8, {"rollout": 1}),
    ],
)
def test_elastic_workers_come_and_go_without_a_leak(
    make_run_config: MakeRunConfig, num_gpus: int, ranks: int, workers: dict[str, int], seed: int
) -> None:
    names = [f"GPU-{index:02d}" for index in range(num_gpus)]
    config = make_run_config(
        model={"device": "auto"},
        trainer={"ranks": ranks},
        broker={"partitions_per_version": ranks},
        workers={"rollout": workers["rollout"]},
    )
    found = DeviceAssignment(config, names)
    trained = set(gpu_of(found, ("trainer", 0)).split(","))
    assert len(trained) == ranks
    left = set(names) - trained or set(names)
    base = {
        (role, index): gpu_of(found, (role, index))
        for role, count in config.roles().items()
        if role != "trainer" and found.variables(role, 0)
        for index in range(count)
    }
    held, joined, random, index = (
        dict(found._placed),
        dict[tuple[str, int], str](),
        Random(seed),
        99,
    )
    for _ in range(NUM_CHANGES):
        if joined and random.random() < len(joined) / (2 * num_gpus):
            gone = random.choice(sorted(joined))
            del joined[gone]
            found.release(f"{gone[0]}-{gone[1]}")
        else:
            index += 1
            before = loads(found, base | joined, left)
            if trained == set(names):
                before.update(trained)  # each has a rank
            worker = (random.choice(["rollout", "judge"]), index)
            joined[worker] = gpu_of(found, worker)
            assert joined[worker] in left, "a device of the trainer, while others are left"
            assert before[joined[worker]] == min(before.values()), "not where least is computed"
    assert all(gpu_of(found, worker) == name for worker, name in (base | joined).items())
    assert set(gpu_of(found, ("trainer", 0)).split(",")) == trained
    for role, number in joined:
        found.release(f"{role}-{number}")
    assert found._placed == held, "a worker that left is remembered"
    again = [gpu_of(found, ("rollout", 10_000 + number)) for number in range(num_gpus)]
    assert set(again) <= left
    assert len(again) == num_gpus


def test_worker_that_leaves_twice_or_never_came_changes_nothing(
    make_run_config: MakeRunConfig,
) -> None:
    found = DeviceAssignment(make_run_config(model={"device": "auto"}), ["0", "1", "2"])
    held: dict[str, Any] = dict(found._placed)
    gpu_of(found, ("rollout", 5))
    found.release("rollout-5")
    found.release("rollout-5")
    found.release("judge-7")
    assert found._placed == held
