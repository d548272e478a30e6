"""An inference engine that takes the time of the paper's and computes nothing: it sleeps on a timer
and hands out dummy tokens.

It runs next to its worker, as an engine with devices of its own does: what the worker does between
two polls costs it no time. All running samples advance alike, slower the more there are; `done`
counts the tokens that each has got since the beginning.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.profiles import Timing
from relax_events.config import EngineConfig, ModelConfig
from relax_events.engines.protocol import (
    EngineUsage,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.weights import Weights

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8).astype(np.int32)
NUM_SAMPLED = 1 << 16
LOGPROB = np.float32(-0.5)


@dataclass(slots=True, eq=False)
class TimedSample:
    """A sample on its way."""

    request: SampleRequest
    prompt_group_id: str
    num_tokens: int
    stop_token_id: int | None
    start: float = 0.0
    segments: list[VersionSegment] = field(default_factory=list)

    def note(self, version: int, num_tokens: int, *, kept_cache: bool = False) -> None:
        """Attribute the tokens since the last note to a version."""
        new = num_tokens - sum(segment.num_tokens for segment in self.segments)
        if new > 0:
            self.segments.append(VersionSegment(version, new, kept_cache))


class TimedEngine:
    """Implements `engines.protocol.Engine`."""

    def __init__(self, model_path: Path, *, config: EngineConfig, model: ModelConfig) -> None:
        """Read the speed from the model folder's `workload.json`."""
        del model
        self.policy_version = 0
        self._config = config
        self._timing = Timing.read(model_path)
        self._divisor = self._timing.lengths.record_divisor
        self._tokens = LETTERS[np.random.default_rng(0).integers(0, len(LETTERS), NUM_SAMPLED)]
        self._logprobs = np.full(NUM_SAMPLED, LOGPROB)
        self._running: list[tuple[float, int, TimedSample]] = []
        self._waiting: deque[TimedSample] = deque()
        self._finished: list[GeneratedSample] = []
        self._order = self._num_ended_tokens = 0
        self._done = 0.0
        self._at = time.monotonic()
        self._asleep = False
        self._interruptions: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._kept_cache: set[str] = set()

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished."""
        return len(self._running) + len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens that each running sample has got since the beginning."""
        return int(self._done)

    @property
    def usage(self) -> EngineUsage:
        """What runs, and the tokens that it and what ended have got."""
        sampled = sum(
            self._num_generated(sample) - len(sample.request.tokens)
            for _, _, sample in self._running
        )
        return EngineUsage(
            num_decoding=len(self._running),
            num_waiting=len(self._waiting),
            num_generated=self._num_ended_tokens + sampled,
        )

    def submit(self, request: GenerationRequest) -> None:
        """Let a prompt group's samples join, or queue where `max_running_samples` are running.

        Raises:
            PoisonSample: The prompt is empty or leaves no room in the context.
        """
        room = self._config.max_context_tokens - len(request.prompt_tokens)
        if not len(request.prompt_tokens) or room <= 0:
            raise PoisonSample(
                f"prompt group {request.prompt_group_id}: the prompt has "
                f"{len(request.prompt_tokens)} tokens, which leaves no room"
            )
        self._advance()
        limit = min(request.sampling.max_new_tokens, room)
        for sample in request.samples:
            num_tokens = self._timing.lengths.record_tokens(sample.seed)
            stops = num_tokens < limit and bool(request.stop_token_ids)
            stop_token_id = request.stop_token_ids[0] if stops else None
            segments = list(sample.segments)
            self._waiting.append(
                TimedSample(
                    sample,
                    request.prompt_group_id,
                    min(num_tokens, limit),
                    stop_token_id,
                    segments=segments,
                )
            )
        self._join()

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Sleep until a sample has finished, the timeout, or an interruption."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._advance()
            now = time.monotonic()
            if self._finished or not self.num_running or self._asleep or now >= deadline:
                break
            with suppress(queue.Empty):
                self._interruptions.get(timeout=min(deadline, max(self._next_end(), now)) - now)
                break
        with suppress(queue.Empty):
            while True:
                self._interruptions.get_nowait()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self) -> None:
        """Let a `poll` that waits return at once."""
        self._interruptions.put(None)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Abort samples and return them with their tokens so far."""
        self._advance()
        everyone = [*(sample for _, _, sample in self._running), *self._waiting]
        aborted_samples = [
            sample
            for sample in everyone
            if sample_ids is None or sample.request.sample_id in sample_ids
        ]
        ended = [
            self._ended(sample, self._num_generated(sample), FinishReason.ABORT)
            for sample in aborted_samples
        ]
        self._running = [item for item in self._running if item[2] not in aborted_samples]
        heapq.heapify(self._running)
        self._waiting = deque(sample for sample in self._waiting if sample not in aborted_samples)
        self._join()
        return ended

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Stand still for as long as loading takes; running samples continue under the new
        version."""
        self._advance()
        for _, _, sample in self._running:
            sample.note(
                self.policy_version,
                self._num_generated(sample),
                kept_cache=sample.request.sample_id in self._kept_cache,
            )
        self._kept_cache = (
            {sample.request.sample_id for _, _, sample in self._running}
            if on_running == "swap"
            else set()
        )
        seconds = self._timing.load_seconds
        if on_running == "restart" and self._running:
            seconds += self._timing.recompute_seconds
        time.sleep(seconds * self._timing.time_scale)
        self._at = time.monotonic()
        self.policy_version = weights.policy_version
        self.wake()

    def sleep(self) -> None:
        """Stand still; what it costs to give the devices away is the trainer's to wait for."""
        self._advance()
        self._asleep = True

    def wake(self) -> None:
        """Go on."""
        if self._asleep:
            self._asleep = False
            self._at = time.monotonic()

    def close(self) -> None:
        """Drop what still runs."""
        self._running, self._waiting = [], deque()

    def _speed(self) -> float:
        """Tokens per real second of each running sample."""
        return self._timing.tokens_per_second(len(self._running)) / self._timing.time_scale

    def _next_end(self) -> float:
        return (
            self._at + (self._running[0][0] - self._done) / self._speed()
            if self._running
            else self._at
        )

    def _advance(self) -> None:
        """Bring everything up to now, one ending after the other: each changes the speed of the
        rest."""
        now = time.monotonic()
        while self._running and not self._asleep:
            if (end := self._next_end()) > now:
                self._done += (now - self._at) * self._speed()
                break
            self._at = end
            self._done, _, sample = heapq.heappop(self._running)
            reason = FinishReason.STOP if sample.stop_token_id is not None else FinishReason.LENGTH
            self._finished.append(self._ended(sample, sample.num_tokens, reason))
            self._join()
        self._at = max(now, self._at)

    def _join(self) -> None:
        """Let waiting samples run while there is room."""
        while self._waiting and len(self._running) < self._config.max_running_samples:
            sample = self._waiting.popleft()
            prefix = len(sample.request.tokens)
            sample.start = self._done - prefix * self._divisor
            self._order += 1
            heapq.heappush(
                self._running,
                (self._done + (sample.num_tokens - prefix) * self._divisor, self._order, sample),
            )

    def _num_generated(self, sample: TimedSample) -> int:
        if sample in self._waiting:
            return len(sample.request.tokens)
        return min(int((self._done - sample.start) / self._divisor), sample.num_tokens - 1)

    def _ended(self, sample: TimedSample, num_tokens: int, reason: FinishReason) -> GeneratedSample:
        sample.note(
            self.policy_version, num_tokens, kept_cache=sample.request.sample_id in self._kept_cache
        )
        first = sample.request.seed % (NUM_SAMPLED - num_tokens)
        tokens = self._tokens[first : first + num_tokens].copy()
        if reason is FinishReason.STOP and sample.stop_token_id is not None:
            tokens[-1] = sample.stop_token_id
        prefix = sample.request.tokens
        tokens[: len(prefix)] = prefix
        self._num_ended_tokens += num_tokens - len(prefix)
        return GeneratedSample(
            sample_id=sample.request.sample_id,
            prompt_group_id=sample.prompt_group_id,
            tokens=tokens,
            logprobs=self._logprobs[:num_tokens],
            segments=tuple(sample.segments),
            finish_reason=reason,
        )
