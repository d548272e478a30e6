"""Experts of transformers in float64, which its grouped matrix product can't compute."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import Tensor, cat
from transformers.integrations import moe


def use_float64_experts(patch: pytest.MonkeyPatch) -> None:
    """Let experts be computed one after the other, in any dtype, until the patch is undone."""
    patch.setattr(moe, "_grouped_mm", grouped_product)


def grouped_product(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply rows with the matrix of their group; the groups end at `offs`."""
    ends = [0, *offs.tolist()]
    parts = [rows[start:end] @ weight[at] for at, (start, end) in enumerate(pairwise(ends))]
    return cat([*parts, rows.new_zeros(len(rows) - ends[-1], weight.shape[-1])])
