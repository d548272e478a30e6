"""Check prompt groups, samples and ends of prompt groups before a role uses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_events.config import AlgorithmConfig
from relax_events.errors import CorruptRecord, ForeignRecord, PoisonSample
from relax_events.events.parts import REWARD_RANGE, Array, Outcome, StoredArray, is_reward
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.sample_columns import MAX_SAMPLES_PER_PROMPT
from relax_events.events.types import (
    Event,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleReady,
    SampleRolledOut,
)
from relax_events.staleness import IssuedGroup
from relax_events.topics.plan import belongs_on

Sample = TypeVar("Sample", SampleRolledOut, SampleReady)
ROLLED_OUT_ARRAYS = ("loss_mask", "rollout_logprobs")
READY_ARRAYS = (
    "loss_mask",
    "rollout_logprobs",
    "advantages",
    "actor_logprobs",
    "ref_logprobs",
    "values",
    "teacher_logprobs",
)
"""Of a sample, one value for each token."""


def check_issued(event: Event) -> PromptGroupIssued:
    """Check that an event is an issued prompt group that can be generated, and return it.

    Raises:
        PoisonSample: It is not; the text names the field and the value.
    """
    if not isinstance(event, PromptGroupIssued):
        raise PoisonSample(f"expected PromptGroupIssued, got {type(event).__name__}")
    _require_own_id(event, what="prompt group")
    if not 1 <= event.samples_per_prompt <= MAX_SAMPLES_PER_PROMPT:
        raise PoisonSample(
            f"prompt group {event.prompt_group_id}: samples_per_prompt must be 1 to "
            f"{MAX_SAMPLES_PER_PROMPT}, got {event.samples_per_prompt}"
        )
    return event


def require_allowed_event(entity: str, event: Event) -> None:
    """Check that a topic may hold an event.

    Args:
        entity: The topic's name without the prefix of the run.
        event: The event.
    Raises:
        ForeignRecord: The topic's writers may not produce this event.
    """
    if not belongs_on(entity, event):
        raise ForeignRecord(
            f"{entity} must not hold this {type(event).__name__}: the roles that write there "
            "may not produce it"
        )


def check_ended(event: PromptGroupEnded, *, allowed: Sequence[Outcome]) -> PromptGroupEnded:
    """Check that a role may request this end of a prompt group from the trainer, and return it.

    Args:
        event: The decoded event.
        allowed: Outcomes that its writers may request; never that a prompt group was trained.
    Raises:
        ForeignRecord: The prompt group id is invalid, or the outcome is not allowed.
    """
    try:
        _require_own_id(event, what="end of prompt group")
    except PoisonSample as error:
        raise ForeignRecord(str(error)) from None
    if event.outcome not in allowed:
        raise ForeignRecord(
            f"end of prompt group {event.prompt_group_id}: outcome must be "
            f"{', '.join(allowed[:-1])} or {allowed[-1]}, got {event.outcome}"
        )
    return event


def _require_own_id(event: PromptGroupIssued | PromptGroupEnded, *, what: str) -> None:
    """Check that a prompt group's id agrees with the step, index and attempt of its event."""
    try:
        issued = IssuedGroup.parse(event.prompt_group_id)
    except CorruptRecord as error:
        raise PoisonSample(str(error)) from None
    in_id, in_event = (
        (issued.slot.train_step, issued.slot.group_index, issued.attempt),
        (event.train_step, event.group_index, event.attempt),
    )
    if in_id != in_event:
        raise PoisonSample(
            f"{what} {event.prompt_group_id}: the id must name train_step, group_index and "
            f"attempt {in_event}, got {in_id}"
        )


def check_samples(events: Sequence[Event]) -> list[SampleRolledOut]:
    """Check that the events of one record are rolled-out samples with matching shapes and finite
    numbers, and return them.

    Raises:
        PoisonSample: A check failed; the text names the sample, the field and the value.
    """
    samples = _check_forms(events, SampleRolledOut, ROLLED_OUT_ARRAYS, ("topk_ids",))
    for sample in samples:
        if (rewards := sample.environment_rewards) is not None:
            if len(rewards.shape) != 1:
                raise PoisonSample(
                    f"sample {sample.sample_id}: environment_rewards must be one number per turn, "
                    f"got shape {rewards.shape}"
                )
            _require_finite(sample, "environment_rewards")
    _check_values(samples, ROLLED_OUT_ARRAYS)
    return samples


def check_ready(events: Sequence[Event]) -> list[SampleReady]:
    """Check that the events of one record are ready samples with matching shapes and finite
    numbers, and return them.

    Raises:
        PoisonSample: A check failed; the text names the sample, the field and the value.
    """
    token_sets = ("topk_ids", "topk_teacher_logprobs")
    samples = _check_forms(events, SampleReady, READY_ARRAYS, token_sets)
    for sample in samples:
        _check_segments(sample)
        if sample.reward is not None and not is_reward(sample.reward):
            raise PoisonSample(
                f"sample {sample.sample_id}: reward must be {REWARD_RANGE}, got {sample.reward}"
            )
        if sample.reward is None and np.any(np.asarray(sample.advantages)):
            raise PoisonSample(
                f"sample {sample.sample_id}: advantages must be 0 where there is no reward, got "
                f"{_largest(np.asarray(sample.advantages)):g}"
            )
    _check_values(samples, READY_ARRAYS)
    return samples


def _check_forms(
    events: Sequence[Event],
    kind: type[Sample],
    arrays: tuple[str, ...],
    token_sets: tuple[str, ...],
) -> list[Sample]:
    """Check that events are samples of a kind, with arrays and token sets of matching shapes."""
    samples: list[Sample] = []
    for event in events:
        if not isinstance(event, kind):
            raise PoisonSample(f"expected {kind.__name__}, got {type(event).__name__}")
        _check_form(event, arrays)
        _check_token_sets(event, token_sets)
        _check_routed_experts(event)
        _check_paths(event)
        samples.append(event)
    return samples


def _check_segments(sample: SampleReady) -> None:
    """Check that the version segments, where there are any, cover the loss tokens."""
    if not sample.version_segments:
        return
    num_tokens = int(np.count_nonzero(np.asarray(sample.loss_mask)))
    lengths = [segment.num_tokens for segment in sample.version_segments]
    if min(lengths) < 1 or sum(lengths) != num_tokens:
        raise PoisonSample(
            f"sample {sample.sample_id}: version_segments must be positive and add up to "
            f"{num_tokens} loss tokens, got {lengths}"
        )
    oldest, newest = sample.key.min_policy_version, sample.key.max_policy_version
    for segment in sample.version_segments:
        if not oldest <= segment.policy_version <= newest:
            raise PoisonSample(
                f"sample {sample.sample_id}: version_segments must be of versions {oldest} to "
                f"{newest} as its key says, got {segment.policy_version}"
            )


def needed_fields(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Return the fields that an algorithm needs and not every ready sample has."""
    needed = {
        "actor_logprobs": algorithm.old_logprobs == "actor",
        "ref_logprobs": algorithm.has_reference_in_loss,
        "values": algorithm.needs_critic,
        "teacher_logprobs": algorithm.distills,
        "topk_ids": algorithm.has_topk_loss,
        "topk_teacher_logprobs": algorithm.has_topk_loss,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def check_trainable(
    *samples: SampleReady,
    algorithm: AlgorithmConfig,
    needed: Sequence[str] | None = None,
    vocab_size: int,
    max_abs_advantage: float = math.inf,
    experts: ExpertShape | None = None,
) -> None:
    """Check that an algorithm can train a model on ready samples.

    Args:
        *samples: Samples that passed `check_ready`.
        algorithm: Determines which log-probabilities the sample must have.
        needed: Its `needed_fields`, if the caller keeps them.
        max_abs_advantage: Highest absolute value of a token's advantage.
        vocab_size: Size of the model's vocabulary.
        experts: Shape of the routed experts, if the model replays the engine's routing.
    Raises:
        PoisonSample: A check failed; the text names the sample, the field and the value.
    """
    needed = needed_fields(algorithm) if needed is None else needed
    for sample in samples:
        for name in needed:
            if getattr(sample, name) is None:
                raise PoisonSample(
                    f"sample {sample.sample_id}: the algorithm needs {name}, got none; was it "
                    "made under another run file?"
                )
    if _joined([sample.tokens for sample in samples]).max(initial=0) >= vocab_size:
        for sample in samples:
            _require_known_tokens(sample, vocab_size=vocab_size)
    if _largest(_joined([sample.advantages for sample in samples])) > max_abs_advantage:
        for sample in samples:
            _require_bounded_advantages(sample, bound=max_abs_advantage)
    for sample in samples:
        if "topk_ids" in needed:
            _check_used_token_sets(
                sample, num_ids=algorithm.num_compared_tokens, vocab_size=vocab_size
            )
        if experts is not None:
            experts.checked(sample)


def _require_known_tokens(sample: SampleReady, *, vocab_size: int) -> None:
    if (highest := int(np.asarray(sample.tokens).max())) >= vocab_size:
        raise PoisonSample(
            f"sample {sample.sample_id}: tokens must be below the vocabulary's {vocab_size}, "
            f"got {highest}"
        )


def _require_bounded_advantages(sample: SampleReady, *, bound: float) -> None:
    if (largest := _largest(np.asarray(sample.advantages))) > bound:
        raise PoisonSample(
            f"sample {sample.sample_id}: advantages must be at most trainer.max_abs_advantage = "
            f"{bound:g} in magnitude, got {largest:g}; raise it if rewards are that large"
        )


def _largest(values: NDArray[np.generic]) -> float:
    """Return the largest magnitude, 0 without any."""
    return float(np.abs(values).max(initial=0))


def _check_used_token_sets(sample: SampleReady, *, num_ids: int, vocab_size: int) -> None:
    """Check the token ids at which policy and teacher are compared, and the teacher's
    log-probabilities of them.
    """
    where, (ids, teacher) = (
        f"sample {sample.sample_id}",
        (np.asarray(array) for array in (sample.topk_ids, sample.topk_teacher_logprobs)),
    )
    if ids.shape[1] < num_ids:
        raise PoisonSample(
            f"{where}: topk_ids must have at least the {num_ids} ids of algorithm.distill_top_k "
            f"for each loss token, got {ids.shape[1]}"
        )
    ids, teacher = ids[:, :num_ids], teacher[:, :num_ids]
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise PoisonSample(
            f"{where}: topk_ids must be 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}; do "
            "policy and teacher share a vocabulary?"
        )
    if not np.isfinite(teacher).all():
        raise PoisonSample(
            f"{where}: topk_teacher_logprobs must be finite, got "
            f"{teacher[~np.isfinite(teacher)][0]}"
        )


def _check_form(event: SampleRolledOut | SampleReady, fields: tuple[str, ...]) -> None:
    """Check everything but the values of the arrays."""
    where = f"sample {event.sample_id}"
    try:
        IssuedGroup.parse(event.prompt_group_id)
    except CorruptRecord as error:
        raise PoisonSample(f"{where}: {error}") from None
    if (
        not 0
        <= event.policy_version
        <= event.key.min_policy_version
        <= event.key.max_policy_version
    ):
        raise PoisonSample(
            f"{where}: policy_version <= min_policy_version <= max_policy_version must hold, got "
            f"{event.policy_version}, {event.key.min_policy_version}, "
            f"{event.key.max_policy_version}"
        )
    if not 0 < event.temperature < np.inf:
        raise PoisonSample(
            f"{where}: temperature must be above 0 and finite, got {event.temperature}"
        )
    if not 0 <= event.key.sample_index < event.key.samples_per_prompt:
        raise PoisonSample(
            f"{where}: sample_index must be below samples_per_prompt, got "
            f"{event.key.sample_index} of {event.key.samples_per_prompt}"
        )
    tokens = event.tokens
    if tokens.shape in ((), (0,)) or len(tokens.shape) != 1:
        raise PoisonSample(f"{where}: tokens must be a non-empty vector, got shape {tokens.shape}")
    if np.dtype(tokens.dtype).kind not in "iu":
        raise PoisonSample(f"{where}: tokens must be integers, got {tokens.dtype}")
    if not 0 <= event.num_prompt_tokens <= tokens.shape[0]:
        raise PoisonSample(
            f"{where}: num_prompt_tokens must be 0 to {tokens.shape[0]}, got "
            f"{event.num_prompt_tokens}"
        )
    shape = tokens.shape
    for name in fields:
        if (array := getattr(event, name)) is not None and array.shape != shape:
            raise PoisonSample(
                f"{where}: {name} must have the shape of tokens {shape}, got {array.shape}"
            )
    if not isinstance(event.loss_mask, StoredArray) and event.loss_mask[0]:
        raise PoisonSample(
            f"{where}: loss_mask must be 0 at the first token, since no token before it predicts it"
        )


def _check_token_sets(event: SampleRolledOut | SampleReady, fields: tuple[str, ...]) -> None:
    """Check arrays with one row of token ids, or of their log-probabilities, per loss token."""
    arrays = {name: array for name in fields if (array := getattr(event, name)) is not None}
    if not arrays or isinstance(event.loss_mask, StoredArray):
        return
    num_rows = int(event.loss_mask.astype(bool).sum())
    for name, array in arrays.items():
        if len(array.shape) != 2 or array.shape[0] != num_rows:
            raise PoisonSample(
                f"sample {event.sample_id}: {name} must have a row for each of {num_rows} "
                f"loss tokens, got shape {array.shape}"
            )
        kind = "iu" if name == "topk_ids" else "f"
        if np.dtype(array.dtype).kind not in kind:
            raise PoisonSample(
                f"sample {event.sample_id}: {name} must be "
                f"{'integers' if name == 'topk_ids' else 'floats'}, got {array.dtype}"
            )
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = " and ".join(str(array.shape) for array in arrays.values())
        raise PoisonSample(
            f"sample {event.sample_id}: {' and '.join(arrays)} must have one shape, got {shapes}"
        )


def _check_routed_experts(event: SampleRolledOut | SampleReady) -> None:
    if (experts := event.routed_experts) is None:
        return
    where, num_rows = f"sample {event.sample_id}", event.tokens.shape[0] - 1
    if len(experts.shape) != 3 or experts.shape[0] != num_rows:
        raise PoisonSample(
            f"{where}: routed_experts must be [{num_rows}, layers, top_k], a row for each token "
            f"but the last, got shape {experts.shape}"
        )
    if np.dtype(experts.dtype).kind not in "iu":
        raise PoisonSample(f"{where}: routed_experts must be integers, got {experts.dtype}")


def _check_paths(event: SampleRolledOut | SampleReady) -> None:
    """Check the paths of an episode that branched."""
    lengths, media = event.path_lengths, event.path_media
    if media and len(media) != len(lengths):
        raise PoisonSample(
            f"sample {event.sample_id}: path_media must have an entry for each of {len(lengths)} "
            f"paths, got {len(media)}"
        )
    if not lengths:
        if event.truncated_paths:
            raise PoisonSample(
                f"sample {event.sample_id}: truncated_paths needs path_lengths, got "
                f"{event.truncated_paths}"
            )
        return
    where, total = f"sample {event.sample_id}", event.tokens.shape[0]
    if min(lengths) < 1 or sum(lengths) != total:
        raise PoisonSample(
            f"{where}: path_lengths must be positive and add up to {total} tokens, got {lengths}"
        )
    cut = event.truncated_paths
    if list(cut) != sorted(set(cut)) or not all(0 <= number < len(lengths) for number in cut):
        raise PoisonSample(
            f"{where}: truncated_paths must be ascending and below {len(lengths)}, got {cut}"
        )
    if event.num_prompt_tokens > lengths[0]:
        raise PoisonSample(
            f"{where}: path_lengths must begin with the path of num_prompt_tokens = "
            f"{event.num_prompt_tokens}, got {lengths[0]}"
        )
    if isinstance(event, SampleReady):
        message_media, path_media = event.media, []
    else:
        parts = (part for message in (*event.messages, *event.turns) for part in message.parts)
        message_media = [part.media for part in parts if part.media is not None]
        path_media = media[-1] if media else []
    if message_media != path_media:
        raise PoisonSample(
            f"sample {event.sample_id}: path_media must end with the {len(message_media)} media "
            f"files of its messages, got {len(path_media)}"
        )
    starts = np.cumsum(lengths) - np.array(lengths)
    if not isinstance(event.loss_mask, StoredArray) and event.loss_mask[starts].any():
        raise PoisonSample(
            f"{where}: path_lengths must begin each path with a token that loss_mask leaves out"
        )


def _check_values(
    samples: Sequence[SampleRolledOut | SampleReady], fields: tuple[str, ...]
) -> None:
    """Check that no token id is negative, and that all numbers are finite: each array of the
    samples together with the same array of the others, since a call for each takes most of the
    time.
    """
    tokens = [sample.tokens for sample in samples]
    if _joined(tokens).min(initial=0) < 0:
        for sample in samples:
            if not isinstance(sample.tokens, StoredArray) and sample.tokens.min() < 0:
                raise PoisonSample(
                    f"sample {sample.sample_id}: tokens must be >= 0, got {sample.tokens.min()}"
                )
    for name in fields:
        numbers = [
            array
            for sample in samples
            if isinstance(array := getattr(sample, name), np.ndarray) and array.dtype.kind == "f"
        ]
        if numbers and not _is_finite(_joined(numbers)):
            for sample in samples:
                _require_finite(sample, name)


def _joined(arrays: Sequence[Array | None]) -> NDArray[np.generic]:
    """Return the values that are not in the object store, one array after the other."""
    loaded_arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    return (
        loaded_arrays[0]
        if len(loaded_arrays) == 1
        else np.concatenate(loaded_arrays)
        if loaded_arrays
        else np.zeros(0)
    )


def _is_finite(values: NDArray[np.generic]) -> bool:
    """Return whether all are finite numbers; integers are."""
    # faster than all()
    return values.dtype.kind != "f" or np.count_nonzero(np.isfinite(values)) == values.size


def _require_finite(sample: SampleRolledOut | SampleReady, name: str) -> None:
    """Check that an array holds finite numbers, unless it is in the object store."""
    array = getattr(sample, name)
    if isinstance(array, np.ndarray) and not _is_finite(array):
        raise PoisonSample(
            f"sample {sample.sample_id}: {name} must be finite, got "
            f"{array[~np.isfinite(array)][0]} at {int(np.argmin(np.isfinite(array)))}"
        )
