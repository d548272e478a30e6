"""Check a generation request and build its samples, before any of them is queued.

`SampleState` is a sample in an engine, from its submission to its result. The engines
`transformers` and `sglang` share this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relax_events.config import SamplingConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.events.routed_experts import ExpertShape
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import MediaLayout


@dataclass(slots=True, eq=False)
class SampleState:
    """A sample in an engine. It waits with its tokens so far, or runs in a row of the engine, which
    has the newer tokens.
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
    is_input: NDArray[np.bool_]
    """True for each prompt token that the policy did not sample."""
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
    """While running: the token count from which a policy version applies, the version, and whether
    the cache was computed by an older one.
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


class ServedModel(Protocol):
    """The properties of an engine's model that determine which requests are valid."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def layout(self) -> MediaLayout | None:
        """Layout of media in the token sequence; None if the engine accepts only text."""
        ...

    @property
    def experts(self) -> ExpertShape | None:
        """The shape of recorded expert choices; None if they are not recorded."""
        ...


def build_samples(
    request: GenerationRequest,
    *,
    first_order: int,
    running_ids: Container[str],
    model: ServedModel,
    max_context_tokens: int,
) -> list[SampleState]:
    """Build the samples of a request.

    Args:
        request: The worker's request.
        first_order: Index of the first sample in the order of submission.
        running_ids: Ids of samples in the engine.
        model: Vocabulary size, media layout and expert shape of the model.
        max_context_tokens: Maximum length of prompt and completion together.
    Raises:
        PoisonSample: The request can't be generated; the text says why.
    """
    name = f"prompt group {request.prompt_group_id}"
    vocab_size = model.vocab_size
    _check_tokens(request.prompt_tokens, f"{name}: prompt", vocab_size)
    num_prompt_tokens, is_input = len(request.prompt_tokens), request.is_input
    if num_prompt_tokens == 0:
        raise PoisonSample(f"{name}: the prompt is empty; it needs at least one token")
    if len(is_input) != num_prompt_tokens:
        raise PoisonSample(
            f"{name}: is_sampled must have an entry for each of {num_prompt_tokens} prompt "
            f"tokens, got {len(is_input)}"
        )
    if num_prompt_tokens >= max_context_tokens:
        raise PoisonSample(
            f"{name}: the prompt has {num_prompt_tokens} tokens and must leave room for one more; "
            f"raise engine.max_context_tokens = {max_context_tokens} or drop the row"
        )
    if request.num_top_tokens > vocab_size:
        raise PoisonSample(
            f"{name}: num_top_tokens must be at most the vocabulary's {vocab_size}, got "
            f"{request.num_top_tokens}"
        )
    shift = _position_shift(request, model, name) if request.media else 0
    max_new_tokens = min(request.sampling.max_new_tokens, max_context_tokens - num_prompt_tokens)
    _check_ids(request.samples, running_ids, name)
    samples = [
        _build_sample(request, sample, first_order + index, max_new_tokens, vocab_size, is_input)
        for index, sample in enumerate(request.samples)
    ]
    for sample, requested in zip(samples, request.samples, strict=True):
        sample.position_shift = shift
        if model.experts is not None:
            sample.experts = _recorded_experts(
                requested, model.experts, max_tokens=len(sample.sequence) - 1
            )
    return samples


def _recorded_experts(
    sample: SampleRequest, shape: ExpertShape, *, max_tokens: int
) -> NDArray[np.generic]:
    """Return the experts of a sample's first tokens that earlier attempts recorded."""
    if (recorded := sample.routed_experts) is None:
        return shape.nothing()
    if recorded.shape[1:] != (shape.num_layers, shape.top_k) or len(recorded) > max_tokens:
        raise PoisonSample(
            f"sample {sample.sample_id}: the prefix's routed_experts must be of at most "
            f"{max_tokens} tokens, {shape.num_layers} layers and {shape.top_k} experts, got shape "
            f"{recorded.shape}"
        )
    return shape.compact(recorded)


def _position_shift(request: GenerationRequest, model: ServedModel, name: str) -> int:
    """Return the rotary position after the prompt minus its length; reject media that don't match
    the prompt.
    """
    layout, media = model.layout, [piece.reference for piece in request.media]
    if layout is None:
        raise PoisonSample(
            f"{name} has {len(media)} media files, and the engine passes text only to its model; "
            "use engine 'transformers' and a model that reads media"
        )
    num_tokens = len(request.prompt_tokens)
    indices = layout.find_media_tokens(request.prompt_tokens, request.is_input, media)
    return int(layout.rotary_positions(num_tokens, indices, media).max()) + 1 - num_tokens


def _build_sample(
    request: GenerationRequest,
    sample: SampleRequest,
    order: int,
    max_new_tokens: int,
    vocab_size: int,
    is_input: NDArray[np.bool_],
) -> SampleState:
    name = f"sample {sample.sample_id}"
    if not 0 <= sample.seed < 2**64:
        raise PoisonSample(f"{name}: the seed must be from 0 to 2**64 - 1, got {sample.seed}")
    _check_tokens(sample.tokens, f"{name}: prefix", vocab_size)
    counts = (
        len(sample.tokens),
        len(sample.logprobs),
        sum(segment.num_tokens for segment in sample.segments),
    )
    if len(set(counts)) > 1:
        raise PoisonSample(
            f"{name}: prefix tokens, logprobs and segments must have one length, got "
            f"{counts[0]}, {counts[1]} and {counts[2]}"
        )
    if len(sample.tokens) > max_new_tokens:
        raise PoisonSample(
            f"{name}: the prefix must have at most {max_new_tokens} tokens, got "
            f"{len(sample.tokens)}"
        )
    num_top = request.num_top_tokens
    top_tokens = (
        np.zeros((0, num_top), np.int32) if sample.top_tokens is None else sample.top_tokens
    )
    if num_top and top_tokens.shape != (shape := (len(sample.tokens), num_top)):
        raise PoisonSample(
            f"{name}: the prefix's top_tokens must have the shape {shape}, got {top_tokens.shape}"
        )
    return SampleState(
        order=order,
        sample_id=sample.sample_id,
        prompt_group_id=request.prompt_group_id,
        prompt_tokens=request.prompt_tokens.astype(np.int32, copy=False),
        seed=sample.seed,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        max_new_tokens=max_new_tokens,
        tokens=sample.tokens.astype(np.int32, copy=False),
        logprobs=sample.logprobs.astype(np.float32, copy=False),
        segments=sample.segments,
        top_tokens=top_tokens.astype(np.int32, copy=False),
        is_input=is_input,
        media=request.media,
    )


def _check_tokens(tokens: NDArray[np.int32], name: str, vocab_size: int) -> None:
    if not len(tokens):
        return
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise PoisonSample(
            f"{name} has token id {outside[0]}; the vocabulary has ids 0 to {vocab_size - 1}"
        )


def _check_ids(samples: tuple[SampleRequest, ...], running_ids: Container[str], name: str) -> None:
    counts = Counter(sample.sample_id for sample in samples)
    if repeated := [one for one, count in counts.items() if count > 1 or one in running_ids]:
        raise PoisonSample(
            f"{name}: sample {min(repeated)} is already running; give every sample its own id"
        )
