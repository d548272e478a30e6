"""Tests at a model's start whether packed samples attend to each other.

A short sample is run alone, in the layout, and where it attends to its neighbours; the layout is
accepted where its difference from the sample alone is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()
MAX_LEAK_RATIO = 0.25
"""Largest difference of a packed sample from the sample alone, relative to the difference when it
attends to its neighbours. Rounding is far below it."""
NEIGHBOURS = [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2]
"""Positions of two samples in one row, and of the second of them alone."""
BRANCHES = (
    [0, 1, 2, 3, 4, 3, 4, 5],
    [([5, 8], [-1, 2]), ([8], [-1])],
    [0, 1, 2, 5, 6, 7],
)
"""Positions of two branches behind one prefix; ends and forks of their runs, and of a run in which
one sees the other; and the cells of the second branch and the prefix."""


def is_isolated(
    shared: str, *, alone_output: Tensor, layout_output: Tensor, leaking_output: Tensor
) -> bool:
    """Return whether a layout changes outputs by rounding only, compared with a leak; log both
    differences.

    Args:
        shared: What samples share in the layout, for the log.
        alone_output: The model's output for a sample alone, in at least float32.
        layout_output: The output in the layout.
        leaking_output: The output where the sample attends to its neighbours.
    """
    difference, leak = (
        float((values - alone_output).square().mean().sqrt())
        for values in (layout_output, leaking_output)
    )
    is_apart = difference < MAX_LEAK_RATIO * leak
    log.info(
        "packing.probed",
        shared=shared,
        is_apart=is_apart,
        difference=difference,
        difference_of_a_leak=leak,
    )
    return is_apart


def isolates_neighbours(compute_outputs: Callable[[Sequence[int]], Tensor]) -> bool:
    """Return whether samples that share a row attend to their own tokens alone.

    Args:
        compute_outputs: Returns a model's outputs, in at least float32, for a row with these
            positions.
    """
    with torch.no_grad():
        together, alone = map(compute_outputs, NEIGHBOURS)
        leaking = compute_outputs(range(len(together)))
    return is_isolated(
        "rows",
        alone_output=alone,
        layout_output=together[-len(alone) :],
        leaking_output=leaking[-len(alone) :],
    )


def build_probe(
    positions: Sequence[int], *, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return token and position ids of one row, to test a model."""
    # Counting down, so that a sequence at the end of a row has the same ids as one alone.
    position_ids = torch.tensor([list(positions)], device=device)
    ids = torch.arange(len(positions), 0, -1, device=device)[None] % vocab_size
    return ids, position_ids
