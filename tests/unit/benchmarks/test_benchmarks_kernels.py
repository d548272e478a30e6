"""The comparison of losses with TRL's: the page follows from the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kernels

LOSS = {
    "kernel": "grpo",
    "lengths": "equal",
    "num_items": 10,
    "num_padded": 20,
    "loss_apart": 1e-7,
    "gradient_apart": 3e-6,
}
LOSSES = [{**LOSS, "seconds": {"ours": [0.001, 0.002, 0.004], "TRL": [0.002, 0.004, 0.012]}}]


def test_publish_writes_benchmark_page_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.publish(LOSSES, tmp_path)
    page = (tmp_path / "kernels.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    assert "| grpo | equal | 10 | 20 | 2.00 | 4.00 | 2.00x | 1e-07 | 3e-06 |" in page
    assert len(json.loads((tmp_path / "kernels.json").read_text())["data"]) == 1
