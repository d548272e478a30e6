"""Whole runs whose trainer takes a given time and has weights of a real size: what a step waits
for, and when engines serve the version."""

from __future__ import annotations

import statistics
from dataclasses import replace
from datetime import datetime
from typing import Any

import orjson

from benchmarks.profiles import OMNI_30B, Mode, Pools
from benchmarks.timed_run import FOLDER, Stage, TimedRun

MODE = Mode(name="async K=2", colocated=False, max_staleness=2, num_steps=8, first_step=3)
WORKLOAD = replace(
    OMNI_30B,
    name="weights",
    prompts_per_step=8,
    samples_per_prompt=4,
    num_engines=2,
    lanes_per_engine=8,
    peak_tokens_per_second=20_000.0,
    forward_device_seconds=0.0,
    load_seconds=0.0,
    split=Pools(rollout=8, train=8),
    time_scale=0.25,
)
"""Rollout is always ahead of the trainer, whose steps take about four seconds."""
SIDES = {
    "store, waiting": {"weights.async_publish": "false"},
    "store": {},
    "gloo, waiting": {"weights.transport": "gloo", "weights.async_publish": "false"},
    "gloo": {"weights.transport": "gloo"},
}


class WeightsRun(TimedRun):
    """One run of a side."""

    def __init__(self, stage: Stage, side: str) -> None:
        super().__init__(stage, WORKLOAD, MODE)
        self._side = side

    def _settings(self) -> dict[str, Any]:
        backend = {"trainer.backend": f"{FOLDER / 'weights_trainer.py'}:HeavyBackend"}
        return super()._settings() | backend | SIDES[self._side]

    def served_seconds(self) -> list[float]:
        """Return, for each version and engine, how long after its publication the engine had it."""
        published, delays = self.timeline().published, []
        for path in (self.stage.folder / "runs" / self.run_id / "logs").glob("rollout-*.log"):
            lines = [
                orjson.loads(line) for line in path.read_text().splitlines() if line.startswith("{")
            ]
            loads = [
                line
                for line in lines
                if line["event"] == "weights.loaded" and line["policy_version"] >= MODE.first_step
            ]
            delays += [
                datetime.fromisoformat(line["timestamp"]).timestamp()
                - published[line["policy_version"]]
                for line in loads
            ]
        return delays


def measure(stage: Stage, side: str) -> dict[str, Any]:
    """Run a side once; return its metrics, in seconds."""
    run = WeightsRun(stage, side)
    curves = run.finish(run.start())["curves"]
    exposed = [value or 0.0 for value in curves["phase_seconds"]["weights"][MODE.first_step :]]
    return {
        "side": side,
        "step_seconds": statistics.mean(curves["step_seconds"][MODE.first_step :]),
        "exposed_seconds": statistics.mean(exposed),
        "served_seconds": statistics.median(run.served_seconds()),
    }
