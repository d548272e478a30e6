"""The engine that returns the completions of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_events.config import EngineConfig, ModelConfig, SamplingConfig
from relax_events.engines.dataset import DatasetEngine
from relax_events.engines.protocol import Engine, GenerationRequest, SampleRequest
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason, ObjectRef, VersionSegment
from relax_events.events.types import PolicyVersionPublished
from relax_events.weights.transport import NullWeightsReader


def engine() -> DatasetEngine:
    return DatasetEngine(
        Path("nowhere"),
        config=EngineConfig(threads=1, max_context_tokens=6),
        model=ModelConfig(dtype="float32", path=Path("nowhere")),
    )


def request(*lengths: int, group: str = "g", version: int = 0) -> GenerationRequest:
    """Request completions of these lengths, after a prompt of two tokens."""
    samples = tuple(
        SampleRequest(
            sample_id=f"{group}/{index}",
            seed=index,
            tokens=np.arange(length, dtype=np.int32) + 10 * index,
            logprobs=np.zeros(length, np.float32),
            segments=(VersionSegment(version, length),),
        )
        for index, length in enumerate(lengths)
    )
    return GenerationRequest(
        prompt_group_id=group,
        prompt_tokens=np.array([1, 2], np.int32),
        samples=samples,
        sampling=SamplingConfig(max_new_tokens=32),
        stop_token_ids=(9,),
    )


def test_dataset_engine_returns_each_answer_once_and_unchanged() -> None:
    used: Engine = engine()
    used.submit(request(4, 1))
    used.submit(request(2, group="h"))
    assert used.num_running == 3
    first, second, third = used.poll(timeout_seconds=0)
    assert [sample.sample_id for sample in (first, second, third)] == ["g/0", "g/1", "h/0"]
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([0, 1, 2, 3], [10])
    assert (first.logprobs.tolist(), first.segments, first.finish_reason) == (
        [0] * 4,
        (VersionSegment(0, 4),),
        FinishReason.STOP,
    )
    assert (used.num_running, used.num_tokens, used.poll(timeout_seconds=0)) == (0, 7, [])


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        (
            (1, 5),
            (
                "sample g/1: prompt and completion have 7 tokens; raise "
                "engine.max_context_tokens = "
                "6 or drop the row"
            ),
        ),
        ((1, 0), "sample g/1: engine 'dataset' needs a prompt and a completion"),
    ],
)
def test_dataset_engine_rejects_an_invalid_prompt_group_entirely(
    lengths: tuple[int, ...], text: str
) -> None:
    used = engine()
    with pytest.raises(PoisonSample, match=text):
        used.submit(request(*lengths))
    assert used.num_running == 0


def test_dataset_engine_abort_returns_the_removed_samples() -> None:
    used = engine()
    used.submit(request(1, 2, 3))
    assert [sample.finish_reason for sample in used.abort(["g/1", "x"])] == [FinishReason.ABORT]
    assert [sample.sample_id for sample in used.abort()] == ["g/0", "g/2"]
    assert used.num_running == 0


def test_dataset_engine_adopts_a_published_version_without_its_tensors() -> None:
    used, artifact = engine(), ObjectRef("file:///nowhere", b"d", 1)
    published = PolicyVersionPublished(
        policy_version=7, artifact=artifact, transports=[], start_offsets=[]
    )
    used.load_weights(NullWeightsReader().fetch(published))
    assert used.policy_version == 7
