"""The trainer's losses next to TRL's on the same numbers.

They run in TRL's environment (`benchmarks.loss_kernels`), which shares our torch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, report


def milliseconds(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return 1000 * statistics.median(seconds)


def loss_rows(losses: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Lay out the losses; a ratio is of one turn."""
    return [
        {
            "loss": one["kernel"],
            "lengths": one["lengths"],
            "tokens": f"{one['num_items']:,}",
            "padded": f"{one['num_padded']:,}",
            "ours, ms": f"{milliseconds(one['seconds']['ours']):.2f}",
            "TRL, ms": f"{milliseconds(one['seconds']['TRL']):.2f}",
            "TRL / ours": f"{compute_ratio(one['seconds']):.2f}x",
            "loss apart": f"{one['loss_apart']:.0e}",
            "gradient apart": f"{one['gradient_apart']:.0e}",
        }
        for one in losses
    ]


def compute_ratio(seconds: Mapping[str, Sequence[float]]) -> float:
    """Return how many times longer than ours TRL took: the median over turns."""
    pairs = zip(seconds["ours"], seconds["TRL"], strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


def publish(losses: Sequence[Mapping[str, Any]], folder: Path = report.FOLDER) -> None:
    """Write the page."""
    report.write(
        "kernels",
        title=f"The trainer's losses compared with those of TRL {environment.pinned('trl', 'trl')}",
        command="python -m benchmarks.kernels",
        rows=loss_rows(losses),
        data=losses,
        folder=folder,
    )


def main() -> None:
    """Measure, and write the page."""
    publish(json.loads(environment.run("trl", "-m", "benchmarks.loss_kernels")))


if __name__ == "__main__":
    main()
