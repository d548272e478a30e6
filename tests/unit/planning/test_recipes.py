"""Each recipe is placed on the devices that it names: all workers fit, and none overlap."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import pytest

from relax_events.config import load_run_config
from relax_events.config.devices import DevicesConfig
from relax_events.launcher.device_assignment import DeviceAssignment
from relax_events.planning.device_specs import parse_devices
from relax_events.planning.inventory import COMPUTING_ROLES
from relax_events.session.gpus import VISIBLE
from relax_events.session.planned import plan_devices
from tests.recipes import CONFIGS, RECIPES, planned_devices, read_recipe, write_models

pytestmark = pytest.mark.unit
EXPECTED = {
    "avqa-omni",
    "avqa-omni-async",
    "dapo-math",
    "dapo-math-sync",
    "distillation",
    "genrm",
    "moe-r3",
    "omni-video",
    "open-r1-vl",
}


def test_every_recipe_names_its_devices() -> None:
    assert set(RECIPES) == EXPECTED


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_refuses_unverified_weights(name: str, tmp_path: Path) -> None:
    overrides = write_models(read_recipe(name), tmp_path)
    config = load_run_config(CONFIGS / f"{name}.toml", overrides, environment={})
    sections = (config.engine.sglang, config.judge.engine.sglang)
    assert {section.on_unverified_weights for section in sections} == {"refuse"}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_placed_on_its_devices_without_an_overlap(name: str, tmp_path: Path) -> None:
    overrides = write_models(read_recipe(name), tmp_path)
    config = load_run_config(CONFIGS / f"{name}.toml", overrides, environment={})
    planned = plan_devices(config, devices=planned_devices(name))
    needed = {
        device.index: f"{device.needed / 1e9:.1f} of {device.num_bytes / 1e9:.1f} GB"
        for device in planned.plan.devices
        if not device.fits
    }
    assert planned.plan.fits, f"{needed}; {planned.plan.change}"
    held = {
        device.index: [worker.worker_id for worker in device.workers]
        for device in planned.plan.devices
    }
    assert all(len(workers) == 1 for workers in held.values()), held
    assert len(held) == planned.num_devices, "a device without a worker"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_workers_of_a_recipe_are_shown_gpus_of_their_own(
    name: str, num_servers: int, size: int, tmp_path: Path
) -> None:
    """By the launcher, with tensor-parallel engines, on a machine with enough GPUs."""
    overrides = write_models(read_recipe(name), tmp_path)
    config = load_run_config(CONFIGS / f"{name}.toml", overrides, environment={})
    sglang = config.engine.sglang.model_copy(
        update={"arguments": ("--tp-size", str(size)), "num_servers": num_servers}
    )
    engine = config.engine.model_copy(update={"sglang": sglang})
    config = config.model_copy(update={"engine": engine, "devices": DevicesConfig()})
    assignment = DeviceAssignment(config, [str(index) for index in range(128)])
    shown = {
        (role, index): assignment.variables(role, index)[VISIBLE].split(",")
        for role, count in config.roles().items()
        if role in (*COMPUTING_ROLES, "trainer")
        for index in range(count)
        if role != "critic" or index == 0
    }
    gpus = [gpu for names in shown.values() for gpu in names]
    assert len(set(gpus)) == len(gpus)
    assert len(shown["trainer", 0]) == config.trainer.ranks
    for (role, _), names in shown.items():
        if role in ("rollout", "evaluator"):
            assert len(names) == size * num_servers
    planned = plan_devices(config, devices="128xH200-141GB")
    held = {
        (worker.worker_id, device.index): worker.memory.parts["weights"]
        for device in planned.plan.devices
        for worker in device.workers
        if worker.worker_id.startswith("rollout-")
    }
    assert len(held) == config.workers.rollout * size * num_servers
    assert set(held.values()) == {-(-2 * planned.facts.num_parameters // size)}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_for_several_hosts_names_the_command_that_starts_them(
    name: str, tmp_path: Path
) -> None:
    """Its words are a run file's overrides, and every host has a share of the workers."""
    num_hosts, share, _ = parse_devices(planned_devices(name))
    if num_hosts == 1:
        assert share <= 8, "one machine has no more devices"
        return
    path = CONFIGS / f"{name}.toml"
    (line,) = re.findall(r"^#   relax run (.+)$", path.read_text(), re.MULTILINE)
    _, option, hosts, *overrides = line.split()
    assert option == "--hosts"
    addresses = f"hosts.addresses={json.dumps(hosts.split(','))}"
    models = write_models(read_recipe(name), tmp_path)
    config = load_run_config(path, [*models, *overrides, addresses], environment={})
    assert config.hosts.num_hosts == num_hosts
    gpus = [str(index) for index in range(share)]
    placed = [DeviceAssignment(config, gpus, host=host) for host in range(num_hosts)]
    ranks = [one.list_indices("trainer", config.trainer.ranks) for one in placed]
    engines = [one.list_indices("rollout", config.workers.rollout) for one in placed]
    assert [*chain(*ranks)] == list(range(config.trainer.ranks))
    assert sorted(chain(*engines)) == list(range(config.workers.rollout))
    assert all(rank or engine for rank, engine in zip(ranks, engines, strict=True))
