"""What the samples of a train step take of the log, by stage: bytes of real records of random samples.

python -m benchmarks.log_size --tokens 20000 --samples 1000 --steps 20000
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields

import numpy as np

from benchmarks.ready_samples import ready_sample
from relax_events.events.codec import EventCodec
from relax_events.events.parts import FinishReason
from relax_events.events.sample_columns import join_samples
from relax_events.events.tensors import pack_runs
from relax_events.events.types import (
    Sample,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)

PER_PROMPT = 8


def make_ready(num_tokens: int, *, has_models: bool) -> list[SampleReady]:
    """Return a prompt group of random samples, a tenth of whose tokens are the prompt."""
    generator, num_prompt = np.random.default_rng(0), num_tokens // 10
    mask = np.arange(num_tokens) >= num_prompt

    def logprobs() -> np.ndarray:
        return np.where(mask, -generator.random(num_tokens), 0).astype(np.float32)

    return [
        ready_sample(
            generator.integers(0, 151_936, num_tokens).astype(np.int32),
            num_prompt_tokens=num_prompt,
            samples_per_prompt=PER_PROMPT,
            sample_index=index,
            rollout_logprobs=logprobs(),
            advantages=np.where(mask, generator.normal(), 0).astype(np.float32),
            actor_logprobs=logprobs() if has_models else None,
            ref_logprobs=logprobs() if has_models else None,
        )
        for index in range(PER_PROMPT)
    ]


def list_stages(group: list[SampleReady]) -> dict[str, list[Sample]]:
    """Return the events of a prompt group by stage."""
    first = group[0]
    stages: dict[str, list[Sample]] = {
        "rollout.samples": [
            SampleRolledOut(
                key=one.key,
                version_segments=[],
                tokens=one.tokens,
                loss_mask=one.loss_mask,
                rollout_logprobs=one.rollout_logprobs,
                num_prompt_tokens=one.num_prompt_tokens,
                temperature=1.0,
                finish_reason=FinishReason.STOP,
                completion="",
                messages=[],
            )
            for one in group
        ],
        "reward.scores": [
            SampleScored(key=one.key, reward=one.reward, reward_name="exact") for one in group
        ],
    }
    for role, name in (("actor", "actor_logprobs"), ("reference", "ref_logprobs")):
        if getattr(first, name) is not None:
            stages[f"{role}.logprobs"] = [
                SampleEvaluated(
                    key=one.key, model_role=role, model_version=0, values=getattr(one, name)
                )
                for one in group
            ]
    return stages | {"advantage.samples": list(group)}


def count_bytes(samples: list[Sample]) -> tuple[int, int]:
    """Return the bytes of the records of samples, and what runs of equal values save of them."""
    codec, total, saved = EventCodec(), 0, 0
    for record in join_samples(samples):
        total += len(codec.encode(record))
        arrays = (getattr(record, field.name) for field in fields(record))
        for array in arrays:
            if isinstance(array, np.ndarray):
                packed = pack_runs(array)
                runs = packed.get("run_lengths")
                saved += 0 if runs is None else array.nbytes - len(packed["data"]) - len(runs)
    return total, saved


def describe(num_tokens: int, num_samples: int, num_steps: int) -> Iterable[str]:
    """Yield a line for each stage, and one for all, with and without models that score."""
    for has_models in (False, True):
        yield f"{'with' if has_models else 'without'} reference and actor-forward"
        whole = np.zeros(2)
        for stage, events in list_stages(make_ready(num_tokens, has_models=has_models)).items():
            part = np.array(count_bytes(events)) / PER_PROMPT
            whole += part
            yield f"  {stage}: {part[0] / num_tokens:.2f} B a token"
        after, saved = whole * num_samples
        yield (
            f"  all: {whole[0] / num_tokens:.2f} B a token, {(after + saved) / 1e9:.3f} GB a step "
            f"without runs, {after / 1e9:.3f} GB with them; {after * num_steps / 1e12:.1f} TB in "
            f"{num_steps:,} steps"
        )


def main() -> None:
    """Print what a step's samples take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="of a sample")
    parser.add_argument("--samples", type=int, default=1_000, help="of a step")
    parser.add_argument("--steps", type=int, default=20_000)
    chosen = parser.parse_args()
    for line in describe(chosen.tokens, chosen.samples, chosen.steps):
        print(line)


if __name__ == "__main__":
    main()
