"""What a rollout worker asks of an inference engine.

The worker submits prompt groups and polls for finished samples; the engine never calls back. Who
waits for what:

    worker   submit(request) --> engine     returns at once; the samples queue until a row is free
    worker   poll(timeout)   --> engine     waits for the first finished sample, at most the timeout
    worker   load_weights()  --> engine     returns when the new version serves; takes effect between two tokens
    others   interrupt()     --> engine     a poll that waits returns at its next token: there is something to do for the worker
    worker   abort()         --> engine     returns what has been generated so far, fit to be submitted again

An engine is used by one thread, save for `interrupt`. A sample that was submitted comes back
exactly once: by `poll`, or by `abort`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_events.config import SamplingConfig
from relax_events.events.parts import ChatMessage, FinishReason, VersionSegment
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A sample to generate, or to go on with.

    Attributes:
        sample_id: Unique among the samples in the engine.
        seed: Fixes the draw of every token, together with the token's place in the completion; 0 to
            2**64 - 1.
        tokens: What an aborted attempt has generated, or the answer that the data bring; empty
            where there is neither.
        logprobs: Their log-probabilities, in nats.
        segments: Their policy versions.
        top_tokens: Their most probable tokens, where the request asks for some.
        loss_mask: 1 where the policy chose the token, of an attempt that an environment has
            answered; None where it chose all.
        turns: What was said in that attempt so far, the answer at hand not among it.
        routed_experts: Which experts the first tokens of prompt and completion went through, as far
            as earlier attempts have told; they stay as they are, and the engine tells of the
            others. None for none.
    """

    sample_id: str
    seed: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    top_tokens: NDArray[np.int32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    turns: tuple[ChatMessage, ...] = ()
    routed_experts: NDArray[np.generic] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an environment is told of a prompt.

    Attributes:
        messages: The conversation so far.
        answer: The reference answer.
        metadata: A JSON object as text.
        tools: A JSON list as text, empty where there are none.
    """

    messages: Sequence[ChatMessage]
    answer: str = ""
    metadata: str = "{}"
    tools: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and the samples to draw for it.

    Attributes:
        prompt_group_id: Given back with every sample.
        prompt_tokens: The prompt as the model reads it, chat template and all.
        samples: At least one.
        sampling: How tokens are drawn; `max_new_tokens` counts tokens generated before, too.
        stop_token_ids: A sample ends with finish reason `stop` after the first of these, which
            stays in it.
        media: What the prompt's placeholders stand for, in order; each with the reference that it
            came by.
        num_top_tokens: How many most probable tokens are wanted with each token that is drawn.
        chosen: Which of the prompt's tokens the policy chose, in earlier answers: a placeholder
            among them stands for nothing. None for none.
        task: For the environment, where the run has one; engines don't look at it.
    """

    prompt_group_id: str
    prompt_tokens: NDArray[np.int32]
    samples: tuple[SampleRequest, ...]
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]
    media: tuple[ProcessedMedia, ...] = ()
    num_top_tokens: int = 0
    chosen: NDArray[np.bool_] | None = None
    task: Task | None = None

    @property
    def given(self) -> NDArray[np.bool_]:
        """Which of the prompt's tokens the policy did not choose."""
        return np.ones(len(self.prompt_tokens), bool) if self.chosen is None else ~self.chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSample:
    """A completion, whole or aborted.

    Attributes:
        tokens: The completion alone, its stop token included; what an environment said stands in it
            between the answers.
        logprobs: Of each token under the tempered distribution before top-k and top-p, in nats; 0
            where the policy chose nothing.
        segments: Runs of tokens by policy version; their lengths add up to the tokens that the
            policy chose.
        error: Why the sample failed, where the finish reason is `error`.
        top_tokens: The most probable ids when each token was drawn, [tokens, num_top_tokens], most
            probable first, whatever top-k and top-p left out; None where none are wanted, or the
            engine can't tell. Of tokens that the policy chose alone.
        loss_mask: 1 where the policy chose the token; None where it chose all.
        turns: The answers and what an environment said to them, ending with an answer; none where
            the run has no environment.
        routed_experts: Which experts the tokens of prompt and completion went through when they
            were first read, where the engine was opened with `model.routing_replay`: of all but the
            last, fewer where the sample was aborted. See `events.routed_experts`.
    """

    sample_id: str
    prompt_group_id: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason
    error: str = ""
    top_tokens: NDArray[np.int32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    turns: tuple[ChatMessage, ...] = ()
    routed_experts: NDArray[np.generic] | None = None

    @property
    def num_chosen(self) -> int:
        """Tokens that the policy chose."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """What an engine does, and the tokens that it has dealt with since it was opened.

    Attributes:
        num_decoding: Samples that are decoded, or are at a server.
        num_waiting: Samples that wait for a free row, or for their server.
        num_drawn: Tokens drawn, those of samples that run included.
        num_prefilled: Tokens computed before the next one could be drawn: of prompts, and of
            samples that went on.
        num_reused: Tokens that needed not be: the cache had them, of another sample of the prompt
            or of another request.
        num_resumed: Tokens that had been drawn before their sample went on: behind an abort, other
            weights, a server that went.
    """

    num_decoding: int = 0
    num_waiting: int = 0
    num_drawn: int = 0
    num_prefilled: int = 0
    num_reused: int = 0
    num_resumed: int = 0


class Engine(Protocol):
    """Generates samples under the newest weights it was given."""

    @property
    def policy_version(self) -> int:
        """Of the loaded weights; 0 for the model's own folder."""
        ...

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far, those of samples that run included: by it a slow engine is told from
        one that is stuck.
        """
        ...

    @property
    def usage(self) -> EngineUsage:
        """What it does now and has done; at no cost, so that it can be looked at often."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt group's samples.

        Nothing of the request is queued when it is refused.

        Raises:
            PoisonSample: The prompt is empty, has ids outside the vocabulary, leaves no room in
                `max_context_tokens`, or its media and their places don't fit.
        """
        ...

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Give the samples that finished, waiting for the first; an empty list after the timeout,
        or at once when nothing runs.

        An engine in this process takes its decoding steps in here, so it may overrun the timeout by
        one step.
        """
        ...

    def interrupt(self) -> None:
        """Let a poll that waits return before its time, from any thread; when none waits, the next
        one may return at once.
        """
        ...

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Take samples out, all of them without `sample_ids`, and give them back as they are, with
        finish reason `abort`.

        Samples that finished before come by `poll`; ids that are not running are ignored.
        """
        ...

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Go over to another policy version between two decoding steps, and wake up if asleep.

        Args:
            weights: All tensors of the model, in Hugging Face names.
            on_running: `swap` keeps the running samples' cache, which is the old weights' (their
                next segments say so); `restart` computes it again under the new weights. Neither
                takes back a token.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; the old weights keep
                serving.
        """
        ...

    def sleep(self) -> None:
        """Give the device memory back; running samples wait, and go on after `wake` with their
        cache computed again.
        """
        ...

    def wake(self) -> None:
        """Take the device memory again; does nothing when awake."""
        ...

    def close(self) -> None:
        """End for good, and free everything; samples that still run are dropped."""
        ...
