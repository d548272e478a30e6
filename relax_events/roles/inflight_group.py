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

    It has several leases when its prompt was delivered again while it was at work: the broker was
    away and forgot who holds what, the lease lapsed, or a prompter that died in the middle had
    issued it twice.
    """

    leases: list[Lease]
    issued: PromptGroupIssued
    prompt_tokens: np.ndarray
    answers: tuple[TokenizedTarget, ...] = ()
    """By sample index, where the data bring them and nothing is generated."""
    media: Future[None] | None = None
    """Done when what the prompt shows is on this machine, or can't be had; None where it shows
    nothing."""
    partials: dict[int, GeneratedSample] = field(default_factory=dict)
    """By sample index, unfinished samples of another worker that are resumed."""
    is_resumed: bool = False
    """Whether another worker had begun with it."""
    samples: list[GeneratedSample] = field(default_factory=list)
    trace: TracedWork = NOT_TRACED
    """What its trace shows of the generation."""

    @property
    def has_media(self) -> bool:
        """Whether what the prompt shows need not be waited for."""
        return self.media is None or self.media.done()

    @property
    def is_complete(self) -> bool:
        """Whether every sample has been generated."""
        return len(self.samples) == self.issued.samples_per_prompt

    @property
    def is_finished(self) -> bool:
        """Whether it is complete, and no sample of it was cut off."""
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
        """Settle all leases: the work is finished and safe."""
        for lease in self.leases:
            lease.done()

    def release(self) -> None:
        """Settle all leases: the work was not finished."""
        self.trace.end(error="released unfinished")
        for lease in self.leases:
            lease.release()
