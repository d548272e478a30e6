"""Builds the event of a generated sample."""

from __future__ import annotations

import numpy as np

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample
from relax_events.errors import ConfigError
from relax_events.events.parts import SampleKey
from relax_events.events.types import SampleRolledOut
from relax_events.roles.inflight_group import InflightGroup
from relax_events.runtime.worker import Worker


def build_sample_event(
    group: InflightGroup,
    sample: GeneratedSample,
    *,
    owner: int,
    worker: Worker,
    renderer: PromptRenderer,
) -> SampleRolledOut:
    """Build the event of a finished sample.

    Args:
        group: Its prompt group.
        sample: As the engine returned it.
        owner: The policy version that the whole prompt group is assigned to.
        worker: The worker that generated it.
        renderer: The policy's prompt renderer.
    Raises:
        ConfigError: The engine did not return data that the algorithm needs.
    """
    issued, prompt, completion = group.issued, group.prompt_tokens, sample.tokens
    versions = [segment.policy_version for segment in sample.segments]
    index = int(sample.sample_id.rpartition("/")[2])
    tokens = np.concatenate([prompt, completion]).astype(np.int32, copy=False)
    loss_mask = np.zeros(len(tokens), np.uint8)
    chosen = 1 if sample.loss_mask is None else sample.loss_mask
    loss_mask[len(prompt) :] = group.answers[index].loss_mask if group.answers else chosen
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[len(prompt) :] = sample.logprobs
    key = SampleKey(
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
    return SampleRolledOut(
        key=key,
        version_segments=list(sample.segments),
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        num_prompt_tokens=len(prompt),
        temperature=worker.config.engine.sampling.temperature,
        finish_reason=sample.finish_reason,
        completion=sample.turns[-1].text if sample.turns else renderer.completion_text(completion),
        messages=issued.messages,
        turns=list(sample.turns),
        answer=issued.answer,
        metadata=issued.metadata,
        routed_experts=select_routed_experts(sample, worker.config, num_tokens=len(tokens)),
        topk_ids=select_top_tokens(sample, worker.config),
        worker_id=worker.worker_id,
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
        got = "none" if experts is None else f"those of {len(experts)}"
        need = (
            f"model.routing_replay = 'rollout' needs the routed experts of {num_tokens - 1} tokens "
            f"of sample {sample.sample_id}"
        )
        raise ConfigError(
            f"{need}; engine.name = {config.engine.name!r} gave {got}; take another engine, "
            "or routing_replay = 'none'"
        )
    return experts


def select_top_tokens(sample: GeneratedSample, config: RunConfig) -> np.ndarray | None:
    """Return a sample's top tokens if the loss needs them, else None.

    Raises:
        ConfigError: The engine returned none, or another number of them.
    """
    if not (num_wanted := config.algorithm.num_rollout_top_tokens):
        return None
    wanted = (sample.num_sampled_tokens, num_wanted)
    if sample.top_tokens is None or sample.top_tokens.shape != wanted:
        got = "none" if sample.top_tokens is None else f"shape {sample.top_tokens.shape}"
        need = (
            f"algorithm.distill_tokens = 'student_topk' needs {num_wanted} most probable tokens "
            "with each token"
        )
        remedy = "take another engine, or distill_tokens = 'teacher_topk'"
        raise ConfigError(f"{need}; engine.name = {config.engine.name!r} gave {got}; {remedy}")
    return sample.top_tokens
