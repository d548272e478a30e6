"""Forward-only log-probabilities, for the roles reference and actor-forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from relax_events.config import ModelConfig
from relax_events.training.packing import TokenSequence, pack, pack_order, plain
from relax_events.training.policy_model import PolicyModel, choose_device
from relax_events.training.torch_backend import make_deterministic

if TYPE_CHECKING:
    from relax_events.weights.manifest import Weights


class LogprobScorer:
    """Scores samples with the very forward that the trainer uses, so the two agree to the last bits."""

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
        lengths = [len(plain(sample, "tokens")) for sample in samples]
        return [scores for part in pack_order(lengths, max_tokens=self._max_tokens) for scores in self._score_packed(samples[part])]

    def _score_packed(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        batch = pack(samples, vocab_size=self._model.vocab_size, share_rows=self._model.shares_rows)
        with torch.inference_mode():
            logprobs = self._model.token_logprobs(batch).logprobs.float().cpu().numpy()
        masks = [plain(sample, "loss_mask").astype(bool) for sample in samples]
        scores = [np.zeros(len(mask), np.float32) for mask in masks]
        for values, mask, piece in zip(scores, masks, np.split(logprobs, np.cumsum(batch.num_loss_tokens)[:-1]), strict=True):
            values[mask] = piece
        return scores

    def load_weights(self, weights: Weights) -> None:
        """Go over to another policy version; on an error the old one stays.

        Raises:
            WeightsError: The weights don't fit the model.
        """
        self._model.replace_weights(weights.tensors)
        self.policy_version = weights.policy_version
