"""Forward-only log-probabilities, for the roles reference and actor-forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.config import ModelConfig
from relax_events.models.causal_lm import choose_device
from relax_events.training.packing import PackedBatch, TokenSequence, pack, pack_order, padded_length, plain
from relax_events.training.policy_model import PolicyModel
from relax_events.training.torch_backend import make_deterministic

if TYPE_CHECKING:
    from relax_events.weights.manifest import Weights

ROW_TOKENS = 16


class LogprobScorer:
    """Scores samples with the model code that the trainer uses.

    On one CPU thread a sample's scores are the same bits whatever is scored beside it, so that a run does not depend on how
    its records happened to be fetched.
    """

    def __init__(self, model_path: Path, *, model: ModelConfig, threads: int, max_tokens: int) -> None:
        """Load a model at version 0.

        Args:
            model_path: A folder in Hugging Face layout; the reference's may differ from `model.path`.
            model: Dtype, device and attention.
            threads: CPU threads; 0 leaves the choice to torch.
            max_tokens: Budget of one packed forward.
        Raises:
            ConfigError: The model can't be loaded.
        """
        device = choose_device(model.device)
        make_deterministic(device, threads=threads)
        self.policy_version = 0
        self._model = PolicyModel(model_path, config=model, device=device)
        self._max_tokens = max_tokens

    def score(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Give the tempered log-probability of every loss token, in nats, and 0 elsewhere.

        Args:
            samples: In any number; they are packed into forwards within the budget.
        Returns:
            One array for each sample, as long as its tokens.
        Raises:
            PoisonSample: A sample can't be scored; the text names it.
        """
        model = self._model
        return score_apart(
            samples, max_tokens=self._max_tokens, vocab_size=model.vocab_size, evaluate=lambda batch: model.token_logprobs(batch).logprobs
        )

    def load_weights(self, weights: Weights) -> None:
        """Go over to another policy version; on an error the old one stays.

        Raises:
            WeightsError: The weights don't fit the model.
        """
        self._model.replace_weights(weights.tensors)
        self.policy_version = weights.policy_version


def score_apart(
    samples: Sequence[TokenSequence], *, max_tokens: int, vocab_size: int, evaluate: Callable[[PackedBatch], Tensor]
) -> list[NDArray[np.float32]]:
    """Evaluate the loss tokens of samples, each in a row of its own among rows of one padded length: its bits depend on nothing but itself.

    Args:
        samples: In any number.
        max_tokens: Budget of one packed forward.
        vocab_size: Bound of the token ids that the model takes.
        evaluate: Gives a number for each loss token of a packed forward.
    Returns:
        One array for each sample, as long as its tokens, 0 where the loss mask is.
    Raises:
        PoisonSample: A sample can't be evaluated; the text names it.
    """
    alike: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        alike[padded_length(len(plain(sample, "tokens")), multiple=ROW_TOKENS)].append(index)
    scores: dict[int, NDArray[np.float32]] = {}
    for length, indices in alike.items():
        for part in pack_order([length] * len(indices), max_tokens=max_tokens):
            rows = [samples[index] for index in indices[part]]
            batch = pack(rows, vocab_size=vocab_size, share_rows=False, row_multiple=ROW_TOKENS)
            with torch.inference_mode():
                values = evaluate(batch).float().cpu().numpy()
            scores |= zip(indices[part], _unpacked(values, rows, batch.num_loss_tokens), strict=True)
    return [scores[index] for index in range(len(samples))]


def _unpacked(values: NDArray[np.float32], rows: Sequence[TokenSequence], num_loss_tokens: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    masks = [plain(sample, "loss_mask").astype(bool) for sample in rows]
    scores = [np.zeros(len(mask), np.float32) for mask in masks]
    for score, mask, piece in zip(scores, masks, np.split(values, np.cumsum(num_loss_tokens)[:-1]), strict=True):
        score[mask] = piece
    return scores
