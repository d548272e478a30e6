"""A prompt group in a rollout worker, from its lease to its last sample: its state, the request
that it sends to the engine, and the event of each generated sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from relax_events.config import AlgorithmConfig, RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sft_targets import TokenizedTarget
from relax_events.engines.protocol import (
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.errors import ConfigError
from relax_events.events.parts import FinishReason, SampleKey, VersionSegment
from relax_events.events.types import PromptGroupIssued, SampleRolledOut
from relax_events.kafka.leases import Lease
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import list_message_media
from relax_events.telemetry.traces import NOT_TRACED, TracedWork, Value

LOST = (FinishReason.ERROR, FinishReason.LOST)
MAX_ERROR_CHARACTERS = 600


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
    def unfinished_ids(self) -> list[str]:
        """Ids of the samples that are not generated yet, in order."""
        finished = {sample.sample_id for sample in self.samples}
        names = (
            f"{self.issued.prompt_group_id}/{index}"
            for index in range(self.issued.samples_per_prompt)
        )
        return [name for name in names if name not in finished]

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

    def resume(self, samples: Mapping[int, GeneratedSample]) -> None:
        """Resume samples of another worker, on weights as new as the newest of their tokens."""
        self.samples = [
            sample for sample in samples.values() if sample.finish_reason is not FinishReason.ABORT
        ]
        self.partials = {
            index: sample
            for index, sample in samples.items()
            if sample.finish_reason is FinishReason.ABORT
        }
        self.is_resumed = bool(samples)
        versions = [
            segment.policy_version for sample in samples.values() for segment in sample.segments
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
    def lost(self) -> list[GeneratedSample]:
        """The samples that failed."""
        return [sample for sample in self.samples if sample.finish_reason in LOST]

    def find_failure(self, algorithm: AlgorithmConfig) -> str:
        """Return why too few samples are usable for training, empty if enough are."""
        num_samples, lost = self.issued.samples_per_prompt, self.lost
        num_usable = num_samples - len(lost)
        num_needed = algorithm.count_needed_samples(num_samples)
        if num_usable >= num_needed:
            return ""
        return (
            f"engine: {num_usable} of {num_samples} samples are usable, {num_needed} are needed "
            f"(algorithm.min_samples_per_group): {len(lost)} lost; first: "
            f"{lost[0].error:.{MAX_ERROR_CHARACTERS}}"
        )

    def end_trace(self) -> None:
        """End the trace with the results of the generation."""
        num_tokens = sum(len(sample.tokens) for sample in self.samples)
        error = f"engine: {self.lost[0].error}" if self.lost else ""
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


def build_generation_request(
    group: InflightGroup,
    *,
    config: RunConfig,
    policy_version: int,
    stop_token_ids: Sequence[int],
    library: MediaLibrary,
) -> GenerationRequest:
    """Build the request for the samples of a prompt group that are not generated yet.

    Args:
        group: The prompt group, with its media prefetched.
        config: The run.
        policy_version: The version that the engine serves.
        stop_token_ids: Tokens that end an answer.
        library: Loads the prompt's media.
    Raises:
        PoisonSample: A media item can't be loaded.
    """
    issued = group.issued
    indices = [int(name.rpartition("/")[2]) for name in group.unfinished_ids]
    return GenerationRequest(
        prompt_group_id=issued.prompt_group_id,
        prompt_tokens=group.prompt_tokens,
        samples=tuple(
            _build_sample_request(group, index, policy_version=policy_version) for index in indices
        ),
        sampling=config.engine.sampling,
        stop_token_ids=tuple(stop_token_ids),
        media=tuple(library.load(reference) for reference in list_message_media(issued.messages)),
        num_top_tokens=config.algorithm.num_rollout_top_tokens,
        environment_context=EnvironmentContext(
            messages=issued.messages,
            answer=issued.answer,
            metadata=issued.metadata,
            tools=issued.tools,
        ),
    )


def sample_seed(group_seed: int, sample_index: int) -> int:
    """Derive a sample's seed, so that every worker generates the same sample."""
    return int.from_bytes(
        hashlib.blake2b(f"{group_seed}/{sample_index}".encode(), digest_size=7).digest()
    )


def _build_sample_request(
    group: InflightGroup, index: int, *, policy_version: int
) -> SampleRequest:
    """Build the request for a sample: new, resumed from another worker's tokens, or with the
    dataset's completion, whose log-probabilities are 0 because no policy sampled it.
    """
    name, seed = (
        f"{group.issued.prompt_group_id}/{index}",
        sample_seed(group.issued.seed, index),
    )
    if (partial := group.partials.get(index)) is not None:
        return SampleRequest(
            sample_id=name,
            seed=seed,
            tokens=partial.tokens,
            logprobs=partial.logprobs,
            segments=partial.segments,
            top_tokens=partial.top_tokens,
            loss_mask=partial.loss_mask,
            turns=partial.turns,
            routed_experts=partial.routed_experts,
        )
    tokens = group.answers[index].tokens if group.answers else np.empty(0, np.int32)
    return SampleRequest(
        sample_id=name,
        seed=seed,
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        segments=(VersionSegment(policy_version, len(tokens)),) if group.answers else (),
    )


def build_lost_sample(group: InflightGroup, sample: GeneratedSample) -> GeneratedSample:
    """Return a sample that failed as it is recorded: its prompt alone, without the tokens that it
    may have, in arrays of the shapes of the prompt group's other samples.
    """
    usable = next(one for one in group.samples if one.finish_reason not in LOST)
    experts, tokens = usable.routed_experts, usable.top_tokens
    num_experts = len(group.prompt_tokens) - 1
    return GeneratedSample(
        sample_id=sample.sample_id,
        prompt_group_id=sample.prompt_group_id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        segments=(),
        finish_reason=FinishReason.LOST,
        error=sample.error,
        top_tokens=None if tokens is None else tokens[:0],
        routed_experts=None
        if experts is None
        else np.zeros((num_experts, *experts.shape[1:]), experts.dtype),
    )


def build_sample_event(
    group: InflightGroup,
    sample: GeneratedSample,
    *,
    owner: int,
    config: RunConfig,
    renderer: PromptRenderer,
    worker_id: str,
) -> SampleRolledOut:
    """Build the event of a finished or lost sample.

    Args:
        group: Its prompt group, of which at least one sample is usable.
        sample: As the engine returned it.
        owner: The policy version that the whole prompt group is assigned to.
        config: The run.
        renderer: The policy's prompt renderer.
        worker_id: The worker that generated it.
    Raises:
        ConfigError: The engine did not return data that the algorithm needs.
    """
    if sample.finish_reason in LOST:
        sample = build_lost_sample(group, sample)
    issued, completion = group.issued, sample.tokens
    prompt = group.prompt_tokens if sample.prompt_tokens is None else sample.prompt_tokens
    index = int(sample.sample_id.rpartition("/")[2])
    tokens = np.concatenate([prompt, completion]).astype(np.int32, copy=False)
    loss_mask = np.zeros(len(tokens), np.uint8)
    chosen = 1 if sample.loss_mask is None else sample.loss_mask
    loss_mask[len(prompt) :] = group.answers[index].loss_mask if group.answers else chosen
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[len(prompt) :] = sample.logprobs
    return SampleRolledOut(
        key=_build_key(issued, sample, index=index, owner=owner),
        version_segments=list(sample.segments),
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        num_prompt_tokens=len(prompt),
        temperature=config.engine.sampling.temperature,
        finish_reason=sample.finish_reason,
        completion=sample.turns[-1].text if sample.turns else renderer.completion_text(completion),
        messages=list(sample.prompt_messages) or issued.messages,
        turns=list(sample.turns),
        answer=issued.answer,
        metadata=issued.metadata,
        routed_experts=select_routed_experts(sample, config, num_tokens=len(tokens)),
        topk_ids=select_top_tokens(sample, config),
        path_lengths=list(sample.path_lengths),
        truncated_paths=list(sample.truncated_paths),
        path_media=[list(media) for media in sample.path_media],
        environment_rewards=np.array(rewards) if (rewards := sample.environment_rewards) else None,
        error=sample.error[:MAX_ERROR_CHARACTERS],
        worker_id=worker_id,
    )


def _build_key(
    issued: PromptGroupIssued, sample: GeneratedSample, *, index: int, owner: int
) -> SampleKey:
    versions = [segment.policy_version for segment in sample.segments] or [owner]
    return SampleKey(
        sample_id=sample.sample_id,
        prompt_group_id=issued.prompt_group_id,
        sample_index=index,
        samples_per_prompt=issued.samples_per_prompt,
        train_step=issued.train_step,
        group_index=issued.group_index,
        attempt=issued.attempt,
        row=issued.row,
        policy_version=owner,
        min_policy_version=min(versions),
        max_policy_version=max(versions),
    )


def select_routed_experts(
    sample: GeneratedSample, config: RunConfig, *, num_tokens: int
) -> np.ndarray | None:
    """Return the experts of each of a sample's tokens if routing is replayed, else None.

    Raises:
        ConfigError: The engine did not report the experts of all tokens but the last.
    """
    if not config.model.replays_routing:
        return None
    experts = sample.routed_experts
    if experts is None or len(experts) != num_tokens - 1:
        got = "none" if experts is None else f"the experts of {len(experts)}"
        raise ConfigError(
            f"model.routing_replay = 'rollout' needs the routed experts of {num_tokens - 1} "
            f"tokens of sample {sample.sample_id}; engine.name = {config.engine.name!r} gave "
            f"{got}; take another engine, or routing_replay = 'none'"
        )
    return experts


def select_top_tokens(sample: GeneratedSample, config: RunConfig) -> np.ndarray | None:
    """Return a sample's top tokens if the loss needs them, else None.

    Raises:
        ConfigError: The engine returned none, or another number of them.
    """
    if not (num_tokens := config.algorithm.num_rollout_top_tokens):
        return None
    shape = (sample.num_sampled_tokens, num_tokens)
    if sample.top_tokens is None or sample.top_tokens.shape != shape:
        got = "none" if sample.top_tokens is None else f"shape {sample.top_tokens.shape}"
        raise ConfigError(
            f"algorithm.distill_tokens = {config.algorithm.distill_tokens!r} needs {num_tokens} "
            f"most probable tokens with each token; engine.name = {config.engine.name!r} gave "
            f"{got}; take another engine, or distill_tokens = 'teacher_topk'"
        )
    return sample.top_tokens
