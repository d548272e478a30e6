"""Sample tokens for many rows at once, each with its own random stream.

A token depends on the row's logits, its seed and the token's index in the completion, and not on
other rows: the random number is a hash of seed and index (a counter-based generator), and the token
is its inverse in the cumulative distribution. So a sample is the same whatever runs alongside, and
continues unchanged after an abort.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

MAX_ELEMENTS = 2**24
"""Logits processed at once; it limits the memory of their float64 copies."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of each row; arrays of one length."""

    temperatures: NDArray[np.float32]
    top_ps: NDArray[np.float32]
    top_ks: NDArray[np.int64]

    def __getitem__(self, rows: slice) -> RowSampling:
        """Return the parameters of some of the rows."""
        return RowSampling(self.temperatures[rows], self.top_ps[rows], self.top_ks[rows])

    @property
    def restricts(self) -> bool:
        """Whether any row uses top-k or top-p."""
        return bool((self.top_ps < 1).any() or (self.top_ks > 0).any())


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each pair of seed and position, mixed as in SplitMix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); the
    mixer is Stafford's variant 13.
    """
    mixed = _mix(_mix(seeds + _STEP) + (positions.astype(np.uint64) + np.uint64(1)) * _STEP)
    # 52 bits, not 53: the product of the largest number and any total is then below that total.
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def sample_tokens(
    logits: Float[Tensor, "rows vocabulary"], numbers: NDArray[np.float64], *, sampling: RowSampling
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample a token for each row.

    A row whose logits are not finite gets a log-probability of NaN, and an arbitrary token.

    Args:
        logits: Output of the model.
        numbers: Uniform in [0, 1), one for each row.
        sampling: Temperature, top-p and top-k of each row.
    Returns:
        Tokens, and their log-probabilities under the tempered distribution, in nats, before top-k
        and top-p.
    """
    size = max(1, MAX_ELEMENTS // logits.shape[-1])
    parts = [slice(start, start + size) for start in range(0, len(logits), size)]
    sampled = [_sample_part(logits[part], numbers[part], sampling[part]) for part in parts]
    return np.concatenate([tokens for tokens, _ in sampled]), np.concatenate(
        [logprobs for _, logprobs in sampled]
    )


def _sample_part(
    logits: Float[Tensor, "rows vocabulary"], numbers: NDArray[np.float64], sampling: RowSampling
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    device = logits.device
    logprobs = (
        logits.float() / torch.from_numpy(sampling.temperatures).to(device)[:, None]
    ).log_softmax(-1)
    weights = logprobs.exp().double()
    if sampling.restricts:
        weights = _restrict(weights, sampling)
    cumulative = weights.cumsum(-1)
    thresholds = torch.from_numpy(numbers).to(device)[:, None] * cumulative[:, -1:]
    # Only a row of NaN has no sum above its threshold.
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logits.shape[-1] - 1)
    sampled = logprobs.gather(-1, tokens)
    return tokens[:, 0].cpu().numpy(), sampled[:, 0].cpu().numpy()


def top_tokens(logits: Float[Tensor, "rows vocabulary"], *, num_tokens: int) -> NDArray[np.int32]:
    """Return each row's most probable tokens, most probable first, before temperature, top-k and
    top-p.

    Args:
        logits: Output of the model.
        num_tokens: Number of tokens per row.
    """
    tokens: NDArray[np.int32] = logits.topk(num_tokens, dim=-1).indices.int().cpu().numpy()
    return tokens


def _restrict(
    weights: Float[Tensor, "rows vocabulary"], sampling: RowSampling
) -> Float[Tensor, "rows vocabulary"]:
    """Zero what top-k removes, then what top-p removes; of equal weights the lower token id comes
    first.
    """
    vocabulary = weights.shape[-1]
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    top_ks = torch.from_numpy(np.where(sampling.top_ks > 0, sampling.top_ks, vocabulary)).to(
        weights.device
    )
    ordered = ordered.masked_fill(_ranks(ordered) >= top_ks[:, None], 0.0)
    before = ordered.cumsum(-1) - ordered
    top_ps = torch.from_numpy(sampling.top_ps.astype(np.float64)).to(weights.device)[:, None]
    ordered = ordered.masked_fill(
        (before >= top_ps * ordered.sum(-1, keepdim=True)) & (top_ps < 1), 0.0
    )
    return torch.zeros_like(weights).scatter_(-1, order, ordered)


def _ranks(ordered: Tensor) -> Int[Tensor, " vocabulary"]:
    return torch.arange(ordered.shape[-1], device=ordered.device)
