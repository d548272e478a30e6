"""A short supervised start: next-token training on reference answers, until reinforcement learning finds something to reinforce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_events.config import WarmStartConfig

IGNORED = -100
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """A prompt, and the completion that the model should have written, with its end token."""

    prompt_tokens: NDArray[np.int32]
    answer_tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Examples side by side, padded on the left; `labels` are `IGNORED` wherever there is nothing to learn."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor


def warm_start(
    model: PreTrainedModel, *, batch: Callable[[int], Sequence[SupervisedExample]], config: WarmStartConfig, report: Callable[[int, float], None]
) -> None:
    """Train a model in place by AdamW for `config.steps` supervised steps, or until the loss is below `config.target_loss`.

    Args:
        model: The policy.
        batch: Gives the examples of a step, counted from 0.
        config: Steps, target and learning rate.
        report: Called after each step with its number, counted from 1, and its mean loss per answer token in nats.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    model.train()
    for step in range(config.steps):
        loss = _answer_loss(model, pad_left(batch(step), device=model.device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        report(step + 1, loss.item())
        if loss.item() < config.target_loss:
            break
    model.train(mode=False)


def greedy_completions(model: PreTrainedModel, examples: Sequence[SupervisedExample]) -> list[NDArray[np.int32]]:
    """Let the model complete the prompts by its likeliest tokens, up to the length of the longest reference answer."""
    prompts = pad_left([SupervisedExample(example.prompt_tokens, example.answer_tokens[:0]) for example in examples], device=model.device)
    max_new_tokens = max(len(example.answer_tokens) for example in examples)
    generate: Any = model.generate  # Typed by transformers as a tensor or a module.
    output = generate(input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=max_new_tokens, do_sample=False)
    return list(output[:, prompts.input_ids.shape[1] :].cpu().numpy().astype(np.int32))


def pad_left(examples: Sequence[SupervisedExample], *, device: torch.device) -> PaddedBatch:
    """Put examples side by side so that all end in the last column."""
    width = max(len(example.prompt_tokens) + len(example.answer_tokens) for example in examples)
    tokens = np.zeros((len(examples), width), dtype=np.int64)
    mask = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORED)
    for row, example in enumerate(examples):
        length = len(example.prompt_tokens) + len(example.answer_tokens)
        tokens[row, width - length :] = np.concatenate([example.prompt_tokens, example.answer_tokens])
        mask[row, width - length :] = 1
        labels[row, width - len(example.answer_tokens) :] = example.answer_tokens
    positions = (mask.cumsum(axis=1) - 1).clip(min=0)
    return PaddedBatch(*(torch.from_numpy(array).to(device) for array in (tokens, mask, positions, labels)))


def _answer_loss(model: PreTrainedModel, batch: PaddedBatch) -> Tensor:
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids, use_cache=False)
    logits = output.logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
