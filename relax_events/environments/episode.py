"""A running multi-turn sample, and the request for its next turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.engines.protocol import (
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.requests import merge_segments
from relax_events.environments.reply_media import ProcessedReply
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason, MediaRef, VersionSegment
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects.store import list_message_media


@dataclass(slots=True, eq=False)
class Episode:
    """A running sample: the finished turns after its prompt; the engine has the current one."""

    request: GenerationRequest
    task: EnvironmentContext
    sample_id: str
    seed: int
    media: tuple[ProcessedMedia, ...]
    turns: list[ChatMessage] = field(default_factory=list)
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: tuple[VersionSegment, ...] = ()
    top_tokens: NDArray[np.int32] | None = None
    routed_experts: NDArray[np.generic] | None = None
    """The experts of the tokens of prompt and completion that the engine has computed."""

    @property
    def num_turns(self) -> int:
        """Finished turns of the policy so far."""
        return sum(message.role == ASSISTANT for message in self.turns)

    @property
    def num_left(self) -> int:
        """Tokens that the policy may still generate."""
        return self.request.sampling.max_new_tokens - int(self.loss_mask.sum())

    def restore(self, sample: SampleRequest, *, load: Callable[[MediaRef], ProcessedMedia]) -> None:
        """Restore the turns of an earlier attempt, up to its last reply.

        Args:
            sample: The request, with the turns and tokens of the attempt.
            load: Loads a media file of the replies.
        Raises:
            PoisonSample: The lengths of loss mask and tokens differ.
        """
        if sample.loss_mask is None or len(sample.loss_mask) != len(sample.tokens):
            raise PoisonSample(
                f"sample {sample.sample_id}: a prefix with turns needs a loss mask as "
                f"long as its {len(sample.tokens)} tokens"
            )
        self.media += tuple(load(reference) for reference in list_message_media(sample.turns))
        self.turns = list(sample.turns)
        count = _num_tokens_through_last_reply(sample.loss_mask)
        self.tokens, self.loss_mask = sample.tokens[:count], sample.loss_mask[:count]
        self.logprobs = sample.logprobs[:count]
        num_sampled = int(self.loss_mask.sum())
        self.segments = _slice_segments(sample.segments, 0, num_sampled)
        self.top_tokens = None if sample.top_tokens is None else sample.top_tokens[:num_sampled]

    def aborted_turn(self, sample: SampleRequest) -> SampleRequest:
        """Return the part of an earlier attempt after its last reply: the aborted turn."""
        reply, num_sampled = len(self.tokens), int(self.loss_mask.sum())
        return replace(
            sample,
            tokens=sample.tokens[reply:],
            logprobs=sample.logprobs[reply:],
            segments=_slice_segments(
                sample.segments, num_sampled, num_sampled + len(sample.tokens) - reply
            ),
            top_tokens=None if sample.top_tokens is None else sample.top_tokens[num_sampled:],
        )

    def empty_turn(self) -> SampleRequest:
        """Return the request for a turn without tokens so far."""
        num_top = self.request.num_top_tokens
        return SampleRequest(
            sample_id=self.sample_id,
            seed=self.seed,
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            segments=(),
            top_tokens=np.empty((0, num_top), np.int32) if num_top else None,
        )

    def next_request(self, sample: SampleRequest) -> GenerationRequest:
        """Build the request for the next turn, or for the rest of it."""
        prompt = self.request.prompt_tokens
        return replace(
            self.request,
            prompt_tokens=np.concatenate([prompt, self.tokens]),
            is_sampled=np.concatenate([np.zeros(len(prompt), bool), self.loss_mask.astype(bool)]),
            samples=(
                replace(
                    sample,
                    seed=turn_seed(self.seed, self.num_turns),
                    loss_mask=None,
                    turns=(),
                    routed_experts=self.routed_experts,
                ),
            ),
            sampling=self.request.sampling.model_copy(update={"max_new_tokens": self.num_left}),
            media=self.media,
        )

    def add_turn(self, turn: GeneratedSample) -> None:
        """Append a turn of the policy, finished or aborted."""
        self.tokens, self.logprobs = (
            np.append(self.tokens, turn.tokens),
            np.append(self.logprobs, turn.logprobs),
        )
        self.loss_mask = np.append(self.loss_mask, np.ones(len(turn.tokens), np.uint8))
        self.segments = merge_segments(self.segments, turn.segments)
        self.routed_experts = turn.routed_experts
        if turn.top_tokens is not None:
            self.top_tokens = (
                turn.top_tokens
                if self.top_tokens is None
                else np.concatenate([self.top_tokens, turn.top_tokens])
            )

    def add_reply(self, reply: ProcessedReply, tokens: NDArray[np.int32]) -> None:
        """Append a reply of the environment."""
        self.turns.append(reply.message)
        self.media += reply.media
        self.tokens, self.logprobs = (
            np.append(self.tokens, tokens),
            np.append(self.logprobs, np.zeros(len(tokens), np.float32)),
        )
        self.loss_mask = np.append(self.loss_mask, np.zeros(len(tokens), np.uint8))

    def without_last_turn(self) -> Episode:
        """Return a copy without the last turn; a resumed sample rebuilds it from its tokens."""
        return replace(self, turns=self.turns[:-1])

    def ended(self, reason: FinishReason, error: str = "") -> GeneratedSample:
        """Return the sample as a result."""
        return GeneratedSample(
            sample_id=self.sample_id,
            prompt_group_id=self.request.prompt_group_id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            segments=self.segments,
            finish_reason=reason,
            error=error,
            top_tokens=self.top_tokens,
            loss_mask=self.loss_mask,
            turns=tuple(self.turns),
            routed_experts=self.routed_experts,
        )


def turn_seed(seed: int, num_turns: int) -> int:
    """Derive the seed of a turn; the first one has the sample's own, so that an environment changes
    nothing before its first reply.
    """
    if not num_turns:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{num_turns}".encode(), digest_size=7).digest())


def _num_tokens_through_last_reply(loss_mask: NDArray[np.uint8]) -> int:
    """Return the number of tokens up to the end of the last reply."""
    replies = np.flatnonzero(loss_mask == 0)
    return int(replies[-1]) + 1 if len(replies) else 0


def _slice_segments(
    segments: Sequence[VersionSegment], start: int, end: int
) -> tuple[VersionSegment, ...]:
    """Return the part of segments between two counts of sampled tokens."""
    parts, first = [], 0
    for segment in segments:
        num_tokens = min(first + segment.num_tokens, end) - max(first, start)
        if num_tokens > 0:
            parts.append(replace(segment, num_tokens=num_tokens))
        first += segment.num_tokens
    return tuple(parts)
