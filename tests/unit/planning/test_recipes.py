"""Each recipe is placed on the devices that it names: all workers fit, and none overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.config import load_run_config
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
