"""The engine `dataset`: returns the completions that samples are submitted with and generates
nothing.

It holds no weights. Its policy version is the newest one it was given, so a sample carries the
version that was current when the sample was built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from relax_events.config import EngineConfig, ModelConfig
from relax_events.engines.protocol import (
    EngineUsage,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason
from relax_events.weights import Weights


class DatasetEngine:
    """Implements `engines.protocol.Engine`: returns each sample with the tokens of its request."""

    def __init__(
        self, model_path: Path, *, config: EngineConfig, model: ModelConfig, policy_version: int = 0
    ) -> None:
        """Start empty; no model is loaded.

        Args:
            model_path: Ignored.
            config: `max_context_tokens` limits prompt and completion together.
            model: Ignored.
            policy_version: The version until another one is loaded.
        """
        del model_path, model
        self.policy_version = policy_version
        self._max_context_tokens = config.max_context_tokens
        self._waiting: dict[str, GeneratedSample] = {}
        self.num_tokens = 0
        """Tokens returned so far."""

    @property
    def usage(self) -> EngineUsage:
        """Samples that wait for a poll, and tokens returned so far; nothing is computed."""
        return EngineUsage(num_waiting=len(self._waiting), num_generated=self.num_tokens)

    @property
    def num_running(self) -> int:
        """Samples submitted and not returned yet."""
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt group's samples.

        Raises:
            PoisonSample: A sample has no completion, or one too long for `max_context_tokens`;
                nothing is truncated.
        """
        for sample in request.samples:
            self._check(request, sample)
        self._waiting |= {
            sample.sample_id: _to_generated(request, sample) for sample in request.samples
        }

    def _check(self, request: GenerationRequest, sample: SampleRequest) -> None:
        if not len(request.prompt_tokens) or not len(sample.tokens):
            raise PoisonSample(
                f"sample {sample.sample_id}: engine 'dataset' needs a prompt and a completion; "
                "algorithms that generate samples need another engine"
            )
        if (length := len(request.prompt_tokens) + len(sample.tokens)) > self._max_context_tokens:
            raise PoisonSample(
                f"sample {sample.sample_id}: prompt and completion have {length} tokens; raise "
                f"engine.max_context_tokens = {self._max_context_tokens} or drop the row"
            )

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return everything that was submitted, at once."""
        del timeout_seconds
        finished, self._waiting = list(self._waiting.values()), {}
        self.num_tokens += sum(len(sample.tokens) for sample in finished)
        return finished

    def interrupt(self) -> None:
        """Do nothing: no poll waits."""

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all of them without `sample_ids`, and return them as they
        were submitted.
        """
        removed_ids = [
            sample_id
            for sample_id in self._waiting
            if sample_ids is None or sample_id in sample_ids
        ]
        return [
            dataclasses.replace(self._waiting.pop(sample_id), finish_reason=FinishReason.ABORT)
            for sample_id in removed_ids
        ]

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Serve another policy version; its tensors are ignored."""
        del on_running
        self.policy_version = weights.policy_version

    def sleep(self) -> None:
        """Do nothing: no device memory is held."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Drop the samples that were not returned."""
        self._waiting = {}


def _to_generated(request: GenerationRequest, sample: SampleRequest) -> GeneratedSample:
    return GeneratedSample(
        sample_id=sample.sample_id,
        prompt_group_id=request.prompt_group_id,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        segments=sample.segments,
        finish_reason=FinishReason.STOP,
    )
