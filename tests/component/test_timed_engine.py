"""The benchmarks' timed engine implements the engine protocol, and takes the time that its speed
implies.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import timed_engine
from benchmarks.profiles import Lengths, Timing
from benchmarks.timed_engine import TimedEngine
from relax_events.config import EngineConfig, ModelConfig, SamplingConfig
from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest, SampleRequest
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason
from relax_events.weights import Weights

pytestmark = pytest.mark.unit
STOP = 7
TIMING = Timing(
    lengths=Lengths(median_tokens=200, sigma=0.5, cap_tokens=400, record_divisor=4),
    time_scale=0.01,
    num_engines=1,
    devices_per_engine=1.0,
    peak_tokens_per_second=2e9,
    half_load=1e5,
    train_token_seconds=0.0,
    forward_token_seconds=0.0,
    update_seconds=0.0,
    to_train_seconds=0.0,
    load_seconds=0.0,
)
SLOW = replace(TIMING, peak_tokens_per_second=2.0, half_load=1.0, time_scale=1.0)


class Clock:
    """Time that passes while the engine waits, and never else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timed_engine, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self, *, timeout: float) -> None:
        self.now += timeout
        raise queue.Empty

    def get_nowait(self) -> None:
        raise queue.Empty


def timed_by(clock: Clock, engine: TimedEngine) -> TimedEngine:
    engine._interruptions = clock  # type: ignore[assignment]  # to which nothing is put
    return engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_engine(folder: Path, timing: Timing = TIMING, **settings: Any) -> TimedEngine:
    timing.write(folder)
    config = EngineConfig(**{"threads": 1, "max_context_tokens": 512} | settings)
    return TimedEngine(folder, config=config, model=ModelConfig(dtype="float32", path=folder))


def request(
    number: int, seeds: list[int], *, so_far: list[GeneratedSample] | None = None, **sampling: Any
) -> GenerationRequest:
    """Request samples, or the continuation of aborted ones."""
    empty = SampleRequest(
        sample_id="",
        seed=0,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        segments=(),
    )
    samples = [
        replace(empty, sample_id=f"g{number}/{index}", seed=seed)
        for index, seed in enumerate(seeds)
    ]
    for index, old in enumerate(so_far or []):
        samples[index] = replace(
            samples[index], tokens=old.tokens, logprobs=old.logprobs, segments=old.segments
        )
    return GenerationRequest(
        prompt_group_id=f"g{number}",
        prompt_tokens=np.arange(1, 9, dtype=np.int32),
        samples=tuple(samples),
        sampling=SamplingConfig(**{"max_new_tokens": 100, **sampling}),
        stop_token_ids=(STOP,),
    )


def finish(engine: Engine) -> dict[str, GeneratedSample]:
    finished: list[GeneratedSample] = []
    while engine.num_running:
        finished += engine.poll(timeout_seconds=30.0)
    assert len({sample.sample_id for sample in finished}) == len(finished)
    return {sample.sample_id: sample for sample in finished}


def test_timed_engine_returns_each_sample_once_with_a_length_set_by_its_seed(
    tmp_path: Path,
) -> None:
    engine = make_engine(tmp_path, max_running_samples=3)
    engine.submit(request(0, [1, 2, 3, 4]))
    engine.submit(request(1, [5, 6]))
    samples = finish(engine)
    lengths = {
        f"g0/{seed - 1}" if seed < 5 else f"g1/{seed - 5}": TIMING.lengths.record_tokens(seed)
        for seed in range(1, 7)
    }
    assert {name: len(sample.tokens) for name, sample in samples.items()} == lengths
    assert len(set(lengths.values())) > 2
    for sample in samples.values():
        assert (
            len(sample.logprobs)
            == len(sample.tokens)
            == sum(segment.num_tokens for segment in sample.segments)
        )
        assert (
            (sample.finish_reason is FinishReason.STOP)
            == (sample.tokens[-1] == STOP)
            == (len(sample.tokens) < 100)
        )


def test_timed_engine_ends_a_sample_by_length_at_the_limit(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.submit(request(0, [1, 2], max_new_tokens=5))
    assert {(len(sample.tokens), sample.finish_reason) for sample in finish(engine).values()} == {
        (5, FinishReason.LENGTH)
    }


def test_timed_engine_slows_down_when_samples_share_it(tmp_path: Path, clock: Clock) -> None:
    # As worked out by hand in test_step_simulator: 2 and 4 tokens end after 3 and 5 s, here tenths.
    lengths = Lengths(median_tokens=1, sigma=0.0, cap_tokens=4, record_divisor=1)
    engine = timed_by(clock, make_engine(tmp_path, replace(SLOW, lengths=lengths, time_scale=0.1)))
    short, long = request(0, [1], max_new_tokens=2), request(1, [2], max_new_tokens=4)
    engine._timing = replace(engine._timing, lengths=replace(lengths, median_tokens=4))
    engine.submit(short)
    engine.submit(long)
    ends = {}
    while engine.num_running:
        for sample in engine.poll(timeout_seconds=10.0):
            ends[sample.prompt_group_id] = clock.now
    assert ends == pytest.approx({"g0": 0.3, "g1": 0.5})


def test_timed_engine_keeps_generating_between_polls(tmp_path: Path) -> None:
    lengths = Lengths(median_tokens=8, sigma=0.0, cap_tokens=8, record_divisor=1)
    engine = make_engine(tmp_path, replace(TIMING, lengths=lengths))
    engine.submit(request(0, [1, 2]))
    assert threading.Event().wait(0.05) is False  # the worker is busy elsewhere
    assert len(engine.poll(timeout_seconds=0.0)) == 2


def test_timed_engine_returns_from_a_poll_when_interrupted(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, SLOW)
    engine.submit(request(0, [1, 2]))
    threading.Timer(0.05, engine.interrupt).start()
    started = time.monotonic()
    assert engine.poll(timeout_seconds=30.0) == []
    assert time.monotonic() - started < 20.0


def test_timed_engine_resumes_aborted_samples(tmp_path: Path, clock: Clock) -> None:
    engine = timed_by(clock, make_engine(tmp_path, replace(SLOW, time_scale=1e-3)))
    engine.submit(request(0, [1, 2]))
    assert engine.poll(timeout_seconds=0.02) == []
    aborted = engine.abort()
    assert engine.num_running == 0
    assert {sample.finish_reason for sample in aborted} == {FinishReason.ABORT}
    assert all(0 < len(sample.tokens) == len(sample.logprobs) for sample in aborted)
    other = timed_by(clock, make_engine(tmp_path))
    other.load_weights(Weights(1, {}, b""))
    other.submit(request(0, [1, 2], so_far=aborted))
    for old, (_, sample) in zip(aborted, sorted(finish(other).items()), strict=True):
        assert len(sample.tokens) == TIMING.lengths.record_tokens(int(sample.sample_id[-1]) + 1)
        assert np.array_equal(sample.tokens[: len(old.tokens)], old.tokens)
        assert [segment.policy_version for segment in sample.segments] == [0, 1]


def test_timed_engine_records_version_segments_when_weights_are_swapped(
    tmp_path: Path, clock: Clock
) -> None:
    engine = timed_by(clock, make_engine(tmp_path, replace(SLOW, time_scale=1e-3)))
    engine.submit(request(0, [1]))
    assert engine.poll(timeout_seconds=0.05) == []
    engine.load_weights(Weights(3, {}, b""), on_running="swap")
    engine._timing = TIMING
    (sample,) = finish(engine).values()
    assert [(segment.policy_version, segment.kept_cache) for segment in sample.segments] == [
        (0, False),
        (3, True),
    ]
    assert sum(segment.num_tokens for segment in sample.segments) == len(sample.tokens)
    assert engine.policy_version == 3


def test_timed_engine_generates_no_tokens_while_asleep(tmp_path: Path) -> None:
    engine = make_engine(
        tmp_path, replace(TIMING, time_scale=20_000 * TIMING.time_scale)
    )  # or it may have finished before it was put to sleep
    engine.submit(request(0, [1]))
    engine.sleep()
    assert engine.poll(timeout_seconds=0.05) == []
    engine.wake()
    assert len(finish(engine)) == 1


def test_timed_engine_rejects_a_prompt_that_exceeds_its_context(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_context_tokens=8)
    with pytest.raises(PoisonSample, match="the prompt has 8 tokens"):
        engine.submit(request(0, [1]))
    assert engine.num_running == 0
