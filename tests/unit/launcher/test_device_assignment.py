"""Which GPUs each worker sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.launcher.device_assignment import DeviceAssignment

pytestmark = pytest.mark.unit
MakeRunConfig = Callable[..., RunConfig]
VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS: dict[str, Any] = {"trainer": {"ranks": 4}, "broker": {"partitions_per_version": 4}}


def assign(make_run_config: MakeRunConfig, names: list[str], **sections: Any) -> DeviceAssignment:
    sections.setdefault("model", {"device": "auto"})
    return DeviceAssignment(make_run_config(**sections), names)


def test_workers_see_their_own_gpu_and_ranks_those_of_the_trainer(
    make_run_config: MakeRunConfig,
) -> None:
    found = assign(make_run_config, ["4", "5", "6", "7"], trainer={"ranks": 2})
    assert found.variables("trainer", 0)[VISIBLE] == "4,5"
    assert found.variables("rollout", 0) == {VISIBLE: "6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.variables("reward", 0) == {}  # its function may want a GPU


def test_machine_without_gpus_changes_nothing(make_run_config: MakeRunConfig) -> None:
    found = assign(make_run_config, [])
    assert found.variables("trainer", 0) == found.variables("rollout", 0) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_named_device_of_the_model_changes_nothing(
    make_run_config: MakeRunConfig, device: str
) -> None:
    found = assign(make_run_config, ["0", "1"], model={"device": device})
    assert found.variables("trainer", 0) == {}


def test_elastic_workers_take_the_gpu_with_the_least_load(make_run_config: MakeRunConfig) -> None:
    found = assign(make_run_config, ["0", "1", "2", "3"])
    first = found.variables("rollout", 0)[VISIBLE]
    joined = [found.variables("rollout", index)[VISIBLE] for index in (1, 2)]
    assert "0" not in {first, *joined}
    assert found.variables("rollout", 1)[VISIBLE] == joined[0]  # restarted, at the same place
    found.release("rollout-1")
    assert found.variables("rollout", 3)[VISIBLE] == joined[0]


def test_more_ranks_than_gpus_are_refused(make_run_config: MakeRunConfig) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks is 2, and the trainer has 1 device"):
        assign(make_run_config, ["0"], trainer={"ranks": 2})


def test_engine_sees_the_gpus_that_its_arguments_ask_for(make_run_config: MakeRunConfig) -> None:
    names = [f"GPU-{index}" for index in range(8)]
    engine = {"name": "sglang", "sglang": {"arguments": ["--tp-size", "4"]}}
    found = assign(make_run_config, names, **RANKS, engine=engine)
    assert found.variables("rollout", 0)[VISIBLE] == "GPU-4,GPU-5,GPU-6,GPU-7"
    engine = {"name": "sglang", "sglang": {"arguments": ["--tp-size", "2"], "num_servers": 2}}
    found = assign(
        make_run_config,
        names,
        **RANKS,
        engine=engine,
        devices={"rollout": [7, 6, 5, 4]},
    )
    assert found.variables("rollout", 0)[VISIBLE] == "GPU-7,GPU-6,GPU-5,GPU-4"


def test_server_takes_its_share_of_a_gpu_that_others_use(make_run_config: MakeRunConfig) -> None:
    engine = {"name": "sglang", "sglang": {"arguments": ["--tp-size", "1"]}}
    config = make_run_config(model={"device": "auto"}, engine=engine)
    shares = {"rollout-0": 0.42, "rollout-1": 0.3111}
    found = DeviceAssignment(config, ["0"], shares)
    arguments = 'engine.sglang.arguments=["--tp-size","1","--mem-fraction-static","%s"]'
    assert found.overrides("rollout", 0) == [arguments % "0.420"]
    assert found.overrides("rollout", 1) == [arguments % "0.311"]
    assert found.overrides("rollout", 7) == [arguments % "0.311"]  # elastic
    assert found.overrides("reference", 0) == found.overrides("trainer", 0) == []
    alone = DeviceAssignment(config, ["0", "1"])
    assert alone.overrides("rollout", 0) == []


@pytest.mark.parametrize(
    "engine",
    [
        {"name": "transformers"},
        {"name": "sglang", "sglang": {"arguments": ["--mem-fraction-static", "0.5"]}},
        {"name": "sglang", "sglang": {"arguments": ["--mem-fraction-static=0.5"]}},
        {"name": "sglang", "sglang": {"urls": ["http://localhost:1"]}},
    ],
)
def test_share_is_not_given_to_what_takes_none(
    make_run_config: MakeRunConfig, engine: dict[str, Any]
) -> None:
    config = make_run_config(model={"device": "auto"}, engine=engine)
    assert DeviceAssignment(config, ["0"], {"rollout-0": 0.4}).overrides("rollout", 0) == []
