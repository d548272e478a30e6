"""The paper's two workloads in numbers: lengths, device pools, and what each phase costs. All times
are in the paper's seconds.

How a pool's size changes its times, which is all that is assumed:

- An engine on d devices with n samples running gives each of them `d * peak / (n + d * half_load)`
  tokens per second: alone a sample is bound by latency (`peak / half_load`), many share the
  devices' peak rate.
- Training and the two forward roles are compute: device seconds per token, divided by the devices.
- Colocated, engine and trainer take turns on all devices and pay for each switch. Apart, a
  publication stops an engine for `load_seconds`.

Only `peak`, `half_load` and the device seconds per token were fitted, to the paper's colocated step
and the share of rollout in it; the asynchronous metrics follow from them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import exp
from pathlib import Path
from statistics import NormalDist

FILE = "workload.json"
"""Lies in the model folder of a benchmark run: engine, backend and scorer read their speed from
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Completion lengths: log-normal with a cap, sampled from a sample's seed."""

    median_tokens: float
    sigma: float
    cap_tokens: int
    record_divisor: int
    """The record of a sample holds one token for so many: the bus carries its share of bytes per
    scaled second."""

    def record_tokens(self, seed: int) -> int:
        """Return how many tokens the record of the sample with this seed holds."""
        uniform = (
            int.from_bytes(blake2b(f"length/{seed}".encode(), digest_size=8).digest()) + 0.5
        ) / 2**64
        tokens = min(
            self.median_tokens * exp(self.sigma * NormalDist().inv_cdf(uniform)), self.cap_tokens
        )
        return max(1, round(tokens / self.record_divisor))

    @property
    def max_record_tokens(self) -> int:
        """Tokens of the record of a sample at the cap."""
        return self.cap_tokens // self.record_divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """How many devices each role has; colocated, rollout and train are the same ones."""

    rollout: int
    train: int
    forward: int = 0
    """For each of the roles reference and actor-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How engine and trainer share the time."""

    name: str
    colocated: bool
    max_staleness: int
    num_steps: int
    first_step: int
    """The first that is measured: those before carry the workers' start and the pipeline's
    filling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its data and its machines."""

    name: str
    title: str
    prompts_per_step: int
    samples_per_prompt: int
    lengths: Lengths
    num_engines: int
    lanes_per_engine: int
    """Prompt groups that an engine holds at a time; all engines together stay below a share group's
    200 members."""
    peak_tokens_per_second: float
    half_load: float
    train_device_seconds: float
    """For a token, forward and backward."""
    forward_device_seconds: float
    """For a token in each of the roles reference and actor-forward; 0 without them."""
    update_seconds: float
    switch_seconds: tuple[float, float]
    load_seconds: float
    colocated: Pools
    split: Pools
    time_scale: float
    """Real seconds for one of the paper's, so that the records of a step are a fraction of what two
    cores carry."""
    paper_step_seconds: dict[str, float]
    goal_speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Settings of the stand-ins of one run: a workload on the pools of one mode."""

    lengths: Lengths
    time_scale: float
    """Real seconds for one of the paper's."""
    num_engines: int
    devices_per_engine: float
    peak_tokens_per_second: float
    half_load: float
    train_token_seconds: float
    forward_token_seconds: float
    update_seconds: float
    to_train_seconds: float
    load_seconds: float
    recompute_seconds: float = 0.0
    """Added to a load under which the prefixes of running samples are computed again."""

    def tokens_per_second(self, num_running: int) -> float:
        """Return the speed of each sample while so many run on one engine."""
        return (
            self.devices_per_engine
            * self.peak_tokens_per_second
            / (num_running + self.devices_per_engine * self.half_load)
        )

    def write(self, folder: Path) -> None:
        """Leave it in a model folder."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Timing:
        """Read it from a model folder."""
        fields = json.loads((folder / FILE).read_text())
        return cls(**{**fields, "lengths": Lengths(**fields["lengths"])})


def build_timing(workload: Workload, *, colocated: bool) -> Timing:
    """Put a workload on its pools. Colocated, the forward passes of reference and actor take their
    turn on the trainer's devices."""
    pools = workload.colocated if colocated else workload.split
    shared_forward = 0.0 if pools.forward else 2 * workload.forward_device_seconds
    return Timing(
        lengths=workload.lengths,
        time_scale=workload.time_scale,
        num_engines=workload.num_engines,
        devices_per_engine=pools.rollout / workload.num_engines,
        peak_tokens_per_second=workload.peak_tokens_per_second,
        half_load=workload.half_load,
        train_token_seconds=(workload.train_device_seconds + shared_forward) / pools.train,
        forward_token_seconds=workload.forward_device_seconds / pools.forward
        if pools.forward
        else 0.0,
        update_seconds=workload.update_seconds * workload.colocated.train / pools.train,
        to_train_seconds=workload.switch_seconds[0] if colocated else 0.0,
        load_seconds=workload.switch_seconds[1] if colocated else workload.load_seconds,
    )


QWEN3_4B = Workload(
    name="qwen3-4b",
    title="Qwen3-4B, DAPO, 16 devices (8 + 8 when apart), responses to 20,480 tokens",
    prompts_per_step=32,
    samples_per_prompt=8,
    lengths=Lengths(median_tokens=3000, sigma=1.0, cap_tokens=20_480, record_divisor=16),
    num_engines=4,
    lanes_per_engine=24,
    peak_tokens_per_second=4500,
    half_load=30,
    train_device_seconds=8.25e-4,
    forward_device_seconds=0.0,
    update_seconds=1.0,
    switch_seconds=(5.0, 5.0),
    load_seconds=2.0,
    colocated=Pools(rollout=16, train=16),
    split=Pools(rollout=8, train=8),
    time_scale=0.02,
    paper_step_seconds={"colocate": 225.9, "on-policy streaming": 201.0, "async K=1": 128.6},
    goal_speedup=1.76,
)
OMNI_30B = Workload(
    name="qwen3-omni-30b",
    title=(
        "Qwen3-Omni-30B, image and audio, 16 devices (8 train, 4 rollout, 2 + 2 forward when "
        "apart), responses to 1,024 tokens, half the batch"
    ),
    prompts_per_step=32,
    samples_per_prompt=8,
    lengths=Lengths(median_tokens=100, sigma=1.0, cap_tokens=1024, record_divisor=1),
    num_engines=4,
    lanes_per_engine=20,
    peak_tokens_per_second=365,
    half_load=50,
    train_device_seconds=2.49e-2,
    forward_device_seconds=5.53e-3,
    update_seconds=1.0,
    switch_seconds=(12.7, 12.7),
    load_seconds=5.0,
    colocated=Pools(rollout=16, train=16),
    split=Pools(rollout=4, train=8, forward=2),
    time_scale=0.025,
    paper_step_seconds={"colocate": 267.4, "async K=1": 133.6},
    goal_speedup=2.0,
)
WORKLOADS = {workload.name: workload for workload in (QWEN3_4B, OMNI_30B)}
MODES = (
    Mode(name="colocate", colocated=True, max_staleness=0, num_steps=7, first_step=2),
    Mode(name="on-policy streaming", colocated=False, max_staleness=0, num_steps=7, first_step=2),
    Mode(name="async K=1", colocated=False, max_staleness=1, num_steps=9, first_step=3),
    Mode(name="async K=2", colocated=False, max_staleness=2, num_steps=10, first_step=4),
    Mode(name="async K=4", colocated=False, max_staleness=4, num_steps=12, first_step=6),
)
