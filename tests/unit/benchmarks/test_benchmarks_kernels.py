"""The kernels' benchmark: all implementations of log-probabilities agree, memory is measured, and
the page follows from the metrics.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import head_memory, kernels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return head_memory.make_model(tmp_path, vocab_size=96)


def test_own_head_logprobs_match_those_of_the_full_logits(folder: Path) -> None:
    model = head_memory.opened(folder, "ours")
    tokens = head_memory.token_rows(40, vocab_size=96)
    with torch.no_grad():
        ours, full = head_memory.ours(model, tokens), head_memory.full(model, tokens)
    assert ours.shape == (40,)
    torch.testing.assert_close(ours, full, rtol=1e-5, atol=1e-5)


def test_token_rows_hold_one_token_more_than_the_trained_tokens() -> None:
    assert head_memory.token_rows(4096).shape == (8, 513)
    assert head_memory.token_rows(100).shape == (1, 101)


def test_measured_memory_is_the_peak_that_a_call_adds() -> None:
    found = head_memory.measured(lambda: np.ones(8 * 2**20).sum())
    assert 60 * 2**20 < found["bytes"] < 90 * 2**20  # 64 MiB of float64
    assert head_memory.measured(lambda: None)["bytes"] < 20 * 2**20


def head(side: str, num_tokens: int, num_mebibytes: float) -> dict[str, object]:
    return {
        "side": side,
        "num_tokens": num_tokens,
        "pass": head_memory.BACKWARD,
        "seconds": 2.0,
        "bytes": num_mebibytes * 2**20,
    }


HEADS = [
    head(side, number, size)
    for side, sizes in {
        "full log-softmax": (1800, 7200),
        "TRL": (1000, 3000),
        "ours": (500, 600),
    }.items()
    for number, size in zip((1024, 4096), sizes, strict=True)
]
LOSS = {
    "kernel": "grpo",
    "lengths": "equal",
    "num_items": 10,
    "num_padded": 20,
    "loss_apart": 1e-7,
    "gradient_apart": 3e-6,
}
KERNELS = {
    "losses": [{**LOSS, "seconds": {"ours": [0.001, 0.002, 0.004], "TRL": [0.002, 0.004, 0.012]}}],
    "advantages": [
        {"kernel": "at once", "num_items": 100, "seconds": {"ours": [0.02], "plain torch": [0.05]}}
    ],
}


def test_publish_writes_benchmark_page_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.publish(KERNELS, HEADS, tmp_path)
    page, data = (
        (tmp_path / "kernels.md").read_text(),
        json.loads((tmp_path / "kernels.json").read_text()),
    )
    assert capsys.readouterr().out.strip() == page.strip()
    assert "| grpo | equal | 10 | 20 | 2.00 | 4.00 | 2.00x | 1e-07 | 3e-06 |" in page
    assert "| at once | plain torch | 100 | 50.0 | 2,000 |" in page
    assert "| forward and backward | 4,096 | ours | 2.00 | 600 | 2,374 |" in page
    assert (
        "From 1,024 to 4,096 tokens the peak of forward and backward grows 1.20 times in "
        "ours, 3.00 times in TRL and 4.00 times"
    ) in page
    assert (
        "TRL's losses take 2.00 to 2.00 times (lengths equal) as long as ours; losses and "
        "gradients agree to 3e-06"
    ) in page
    assert len(data["data"]["heads"]) == 6
