"""The state of a prompt group in a rollout worker, from its lease to its last sample."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from relax_events.data.sft_targets import TokenizedTarget
from relax_events.engines.protocol import GeneratedSample
from relax_events.events.parts import FinishReason
from relax_events.events.types import PromptGroupIssued
from relax_events.kafka.leases import Lease
from relax_events.telemetry.traces import NOT_TRACED, TracedWork, Value


@dataclass(slots=True)
class InflightGroup:
    """A leased prompt group and its samples so far.

    It has several leases if its prompt was delivered again during generation: the broker lost its
    lease state in an outage, the lease expired, or a crashed prompter issued the prompt twice.
    """

    leases: list[Lease]
    issued: PromptGroupIssued
    prompt_tokens: np.ndarray
    answers: tuple[TokenizedTarget, ...] = ()
    """Completions of the dataset by sample index, if nothing is generated."""
    media: Future[None] | None = None
    """Done once the prompt's media are cached or have failed; None for a prompt without media."""
    partials: dict[int, GeneratedSample] = field(default_factory=dict)
    """Unfinished samples of another worker that are resumed, by sample index."""
    is_resumed: bool = False
    """Whether another worker had started to generate it."""
    samples: list[GeneratedSample] = field(default_factory=list)
    trace: TracedWork = NOT_TRACED
    """Span of the generation in its trace."""

    @property
    def has_media(self) -> bool:
        """Whether the prompt's media are fetched or failed, or it has none."""
        return self.media is None or self.media.done()

    @property
    def is_complete(self) -> bool:
        """Whether every sample has been generated."""
        return len(self.samples) == self.issued.samples_per_prompt

    @property
    def is_finished(self) -> bool:
        """Whether it is complete, and no sample was aborted."""
        return self.is_complete and all(
            sample.finish_reason is not FinishReason.ABORT for sample in self.samples
        )

    def resume(self, found: Mapping[int, GeneratedSample]) -> None:
        """Resume samples of another worker, on weights as new as the newest of their tokens."""
        self.samples = [
            sample for sample in found.values() if sample.finish_reason is not FinishReason.ABORT
        ]
        self.partials = {
            index: sample
            for index, sample in found.items()
            if sample.finish_reason is FinishReason.ABORT
        }
        self.is_resumed = bool(found)
        versions = [
            segment.policy_version for sample in found.values() for segment in sample.segments
        ]
        self.issued = replace(
            self.issued,
            required_policy_version=max([self.issued.required_policy_version, *versions]),
        )

    @property
    def policy_versions(self) -> list[int]:
        """Versions that its tokens were sampled from."""
        return sorted(
            {segment.policy_version for sample in self.samples for segment in sample.segments}
        )

    @property
    def errors(self) -> list[str]:
        """Errors of failed samples."""
        return [
            sample.error for sample in self.samples if sample.finish_reason is FinishReason.ERROR
        ]

    def end_trace(self) -> None:
        """End the trace with the results of the generation."""
        num_tokens = sum(len(sample.tokens) for sample in self.samples)
        error = f"engine: {self.errors[0]}" if self.errors else ""
        facts: dict[str, Value] = {
            "policy_versions": self.policy_versions,
            "num_samples": len(self.samples),
            "num_tokens": num_tokens,
        }
        self.trace.end(facts, error=error)

    def done(self) -> None:
        """Settle all leases: the samples are acknowledged."""
        for lease in self.leases:
            lease.done()

    def release(self) -> None:
        """Release all leases: the prompt group is unfinished."""
        self.trace.end(error="released unfinished")
        for lease in self.leases:
            lease.release()
