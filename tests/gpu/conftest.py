"""Tests on a GPU. `make test-gpu` runs them on a machine that has one; elsewhere they are skipped."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def one_gpu() -> None:
    """Skip where there is no GPU; begin with none of its memory in the allocator's hands."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
