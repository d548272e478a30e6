"""Encode and decode a sample of 4,096 tokens on one core; print a line for people and one of JSON.

python benchmarks/codec.py
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from relax_events.events.codec import EventCodec
from relax_events.events.parts import FinishReason, SampleKey
from relax_events.events.types import SampleReady

NUM_TOKENS = 4096
NUM_EVENTS = 2000
NUM_ROUNDS = 7
GOAL_PER_SECOND = 10_000


def sample() -> SampleReady:
    """Make a sample whose arrays are as long as a long answer's."""
    generator = np.random.default_rng(0)
    floats = generator.standard_normal(NUM_TOKENS).astype(np.float32)
    return SampleReady(
        key=SampleKey(
            sample_id="000000-0000-0/0",
            prompt_group_id="000000-0000-0",
            sample_index=0,
            samples_per_prompt=8,
            train_step=0,
            group_index=0,
            attempt=0,
            row=0,
            policy_version=0,
            min_policy_version=0,
            max_policy_version=0,
        ),
        tokens=generator.integers(0, 150_000, NUM_TOKENS).astype(np.int32),
        loss_mask=np.ones(NUM_TOKENS, np.uint8),
        rollout_logprobs=floats,
        advantages=floats,
        reward=1.0,
        temperature=1.0,
        num_prompt_tokens=100,
        finish_reason=FinishReason.STOP,
    )


def main() -> None:
    """Measure each direction alone and both together; the median round counts."""
    codec, event = EventCodec(), sample()
    encoded = codec.encode(event)
    seconds: dict[str, list[float]] = {"encode": [], "decode": [], "both": []}
    actions = {
        "encode": lambda: codec.encode(event),
        "decode": lambda: codec.decode(encoded),
        "both": lambda: codec.decode(codec.encode(event)),
    }
    for _ in range(NUM_ROUNDS):
        for name, action in actions.items():
            started = time.perf_counter()
            for _ in range(NUM_EVENTS):
                action()
            seconds[name].append(time.perf_counter() - started)
    rates = {
        f"{name}_per_second": round(NUM_EVENTS / statistics.median(times))
        for name, times in seconds.items()
    }
    reached = "reached" if rates["both_per_second"] >= GOAL_PER_SECOND else "missed"
    print(
        f"{len(encoded)} bytes a sample: {rates['both_per_second']:,} encoded and decoded a "
        f"second; the goal of {GOAL_PER_SECOND:,} is {reached}"
    )
    print(
        json.dumps(
            {
                "num_tokens": NUM_TOKENS,
                "event_bytes": len(encoded),
                **rates,
                "goal_per_second": GOAL_PER_SECOND,
            }
        )
    )


if __name__ == "__main__":
    main()
