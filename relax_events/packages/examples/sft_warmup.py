"""Warm up a model by supervised training on reference answers, so that RL gets non-zero rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_events.config import SftWarmupConfig
from relax_events.media.model_inputs import MediaInputs, MediaSequence, ProcessedMedia
from relax_events.models.families import Family

IGNORED = -100
MAX_GRAD_NORM = 1.0
TEXT = Family()


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """A prompt and its target.

    Attributes:
        prompt_tokens: Tokens of the prompt. answer_tokens: Tokens of the completion with its stop
            token; for several turns with the replies. loss_mask: True on the tokens that the model
            should generate. media: Media of the placeholders in the prompt and in replies.
    """

    prompt_tokens: NDArray[np.int32]
    answer_tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    media: tuple[ProcessedMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch of examples, padded on the left; `labels` are `IGNORED` on tokens without loss."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor
    media: MediaInputs | None = None


def sft_warmup(
    model: PreTrainedModel,
    *,
    batch: Callable[[int], Sequence[SupervisedExample]],
    config: SftWarmupConfig,
    report: Callable[[int, float], None],
    family: Family = TEXT,
) -> None:
    """Train a model in place by AdamW for `config.steps` supervised steps, or until the loss is
    below `config.target_loss`.

    Args:
        model: The policy.
        batch: Returns the examples of a step, counted from 0.
        config: Steps, target and learning rate.
        report: Called after each step with its number, counted from 1, and its mean loss per answer
            token in nats.
        family: The model's family.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    model.train()
    for step in range(config.steps):
        loss = _answer_loss(
            model, pad_left(batch(step), device=model.device, family=family), family
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        report(step + 1, loss.item())
        if loss.item() < config.target_loss:
            break
    model.train(mode=False)


@torch.inference_mode()
def count_correct(
    model: PreTrainedModel, examples: Sequence[SupervisedExample], *, family: Family = TEXT
) -> int:
    """Count the examples that greedy decoding completes correctly."""
    batch = pad_left(examples, device=model.device, family=family)
    targets = batch.labels[:, 1:]
    predicted = _logits(model, batch, family)[:, :-1].argmax(-1)
    return int(((predicted == targets) | (targets == IGNORED)).all(dim=1).sum())


def pad_left(
    examples: Sequence[SupervisedExample], *, device: torch.device, family: Family = TEXT
) -> PaddedBatch:
    """Pad examples on the left to one batch."""
    lengths = [len(example.prompt_tokens) + len(example.answer_tokens) for example in examples]
    width = max(lengths)
    tokens = np.zeros((len(examples), width), dtype=np.int64)
    mask = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORED)
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        tokens[row, width - length :] = np.concatenate(
            [example.prompt_tokens, example.answer_tokens]
        )
        mask[row, width - length :] = 1
        labels[row, width - len(example.answer_tokens) :] = np.where(
            example.loss_mask, example.answer_tokens, IGNORED
        )
    positions = (mask.cumsum(axis=1) - 1).clip(min=0)
    sequences = [_sequence(example, row, width) for row, example in enumerate(examples)]
    media = family.build_inputs(sequences, position_ids=positions)
    input_ids, attention_mask, position_ids, targets = (
        torch.from_numpy(array).to(device) for array in (tokens, mask, positions, labels)
    )
    return PaddedBatch(input_ids, attention_mask, position_ids, targets, media)


def _sequence(example: SupervisedExample, row: int, width: int) -> MediaSequence:
    tokens = np.concatenate([example.prompt_tokens, example.answer_tokens])
    is_input = np.append(np.ones(len(example.prompt_tokens), bool), ~example.loss_mask)
    return MediaSequence(
        f"example {row}",
        tokens,
        is_input,
        example.media,
        (row + 1) * width - len(tokens) + np.arange(len(tokens)),
    )


def _answer_loss(model: PreTrainedModel, batch: PaddedBatch, family: Family) -> Tensor:
    logits = _logits(model, batch, family)[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
    )


def _logits(model: PreTrainedModel, batch: PaddedBatch, family: Family) -> Tensor:
    if batch.media is None:
        output = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )
        logits: Tensor = output.logits
        return logits
    hidden = family.hidden_states(
        model,
        batch.input_ids,
        batch.position_ids,
        batch.media,
        attention_mask=batch.attention_mask,
        use_cache=False,
    )
    media_logits: Tensor = model.get_output_embeddings()(hidden)
    return media_logits
