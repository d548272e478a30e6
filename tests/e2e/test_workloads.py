"""A small benchmark workload: real roles on a real bus, and a time bound that no run goes below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.profiles import OMNI_30B, Mode
from benchmarks.timed_run import TimedRun, open_stage
from benchmarks.workloads import bound_seconds

pytestmark = pytest.mark.e2e


def test_workload_takes_at_least_its_calculated_minimum_time(bootstrap_servers: str) -> None:
    small = replace(
        OMNI_30B, prompts_per_step=4, samples_per_prompt=2, num_engines=2, lanes_per_engine=4
    )
    workload = replace(small, forward_device_seconds=0.0, time_scale=0.005)
    mode = Mode(name="async K=1", colocated=False, max_staleness=1, num_steps=3, first_step=1)
    with open_stage(bootstrap_servers) as stage:
        run = TimedRun(stage, workload, mode)
        report = run.finish(run.start())
        timeline = run.timeline()
    assert report["succeeded"]
    assert report["outcomes"]["trained"] == 12
    assert [len(sample) for step in run.sampled_lengths() for sample in step] == [2] * 12
    sampled = sorted(sum(sum(group) for group in step) for step in run.sampled_lengths())
    trained = sorted(round(mean * 8) for mean in report["curves"]["completion_tokens_mean"])
    assert trained == sampled  # what the bound is calculated from is what the engines generate
    bound = bound_seconds(run)
    assert (
        0 < 2 * bound * workload.time_scale <= timeline.published[3] - timeline.published[0] + 0.002
    )  # of two steps, and the first is in it too
    assert all(seconds >= 0 for seconds in timeline.join_seconds())
