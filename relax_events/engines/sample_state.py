"""A sample in an engine, from its submission to its result; shared by `transformers` and
`sglang`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relax_events.config import SamplingConfig
from relax_events.engines.protocol import GeneratedSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.media.model_inputs import ProcessedMedia


@dataclass(slots=True, eq=False)
class SampleState:
    """A sample in an engine: waiting with its tokens so far, or running in a row that holds
    more.
    """

    order: int
    sample_id: str
    prompt_group_id: str
    prompt_tokens: NDArray[np.int32]
    seed: int
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    is_given: NDArray[np.bool_]
    """Which of the prompt's tokens the policy did not sample."""
    top_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """The most probable ids at each of the tokens, if requested."""
    experts: NDArray[np.generic] = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    """Experts of the first tokens of the sequence, if recorded: [tokens, layers, top_k]."""
    media: tuple[ProcessedMedia, ...] = ()
    position_shift: int = 0
    """Rotary position minus token index after the prompt: an image takes fewer positions than
    tokens.
    """
    version_marks: list[tuple[int, int, bool]] = field(default_factory=list)
    """While running: token count from which a policy version applies, the version, and whether the
    cache is older.
    """

    @property
    def sequence(self) -> NDArray[np.int32]:
        """Prompt and completion so far."""
        return np.concatenate([self.prompt_tokens, self.tokens])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample is finished, or None."""
        if len(self.tokens) and int(self.tokens[-1]) in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_new_tokens else None

    def to_generated(self, reason: FinishReason, *, error: str = "") -> GeneratedSample:
        """Return the sample as a result."""
        return GeneratedSample(
            sample_id=self.sample_id,
            prompt_group_id=self.prompt_group_id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            segments=self.segments,
            finish_reason=reason,
            error=error,
            top_tokens=self.top_tokens if self.top_tokens.shape[1] else None,
            routed_experts=self.experts if self.experts.shape[1] else None,
        )


def merge_segments(
    segments: tuple[VersionSegment, ...], more: Iterable[VersionSegment]
) -> tuple[VersionSegment, ...]:
    """Append runs of tokens; merge equal neighbours, drop empty ones."""
    joined = list(segments)
    for run in more:
        last = joined[-1] if joined else None
        if last and (last.policy_version, last.kept_cache) == (run.policy_version, run.kept_cache):
            joined[-1] = VersionSegment(
                run.policy_version, last.num_tokens + run.num_tokens, run.kept_cache
            )
        elif run.num_tokens:
            joined.append(run)
    return tuple(joined)
