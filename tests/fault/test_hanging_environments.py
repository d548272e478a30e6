"""Whole runs in which the environments of a tenth of the samples hang."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun, assert_ledger_balances

from relax_events.events.parts import FinishReason

pytestmark = pytest.mark.long
SHARE = 10
"""One sample of so many has an environment that hangs, by its id."""
ENVIRONMENT = f"""
import asyncio, time, zlib


class Ordinary:
    def __init__(self, sample):
        self.hangs, self.turn = zlib.crc32(sample.index.encode()) % {SHARE} == 0, 0

    def reset(self):
        return {{}}, {{}}

    def step(self, response_text):
        if self.hangs:
            time.sleep(600)
        self.turn += 1
        return {{"obs_str": "next"}}, self.turn == 2, {{"reward": 0.5}}


class Asynchronous(Ordinary):
    async def step(self, response_text):
        await asyncio.sleep(0)
        return super().step(response_text)
"""


@pytest.mark.parametrize("name", ["Ordinary", "Asynchronous"])
def test_environments_that_hang_cost_their_own_samples(
    start_run: Callable[..., FaultRun], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    run = start_run(
        run={"num_steps": 10},
        algorithm={"kl_coefficient": 0.0, "old_logprobs": "rollout"},
        reward={"function": "environment"},
        engine={"max_context_tokens": 256, "sampling": {"max_new_tokens": 64}},
        environment={
            "interface": "interaction",
            "function": f"{file}:{name}",
            "timeout_seconds": 3.0,
            "processes": 2,
        },
    )
    assert run.wait_until_ended(run.start()) == 0
    assert_ledger_balances(run)
    samples = run.samples()
    late = [one for one in samples if one.finish_reason is FinishReason.LATE]
    assert late
    assert {is_guilty(one.sample_id) for one in late} == {True}
    others = {one.finish_reason for one in samples if not is_guilty(one.sample_id)}
    assert others <= {FinishReason.STOP, FinishReason.LENGTH}
    reasons = [line["error"] for line in run.logged("rollout-0", "episode.failed")]
    assert reasons
    assert not [reason for reason in reasons if re.search(r"attempt \d", reason)]


def is_guilty(sample_id: str) -> bool:
    """Return whether a sample's environment hangs."""
    return zlib.crc32(sample_id.encode()) % SHARE == 0
