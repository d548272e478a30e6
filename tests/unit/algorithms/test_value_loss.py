"""The critic's token losses against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from relax_events.algorithms.value_loss import value_losses

OLD, RETURNS = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, -1.0])
VALUES = [0.1, 0.5, 1.5, 0.5]


@pytest.mark.parametrize(
    ("value_clip", "losses", "gradients"),
    [
        (0.0, [0.405, 0.125, 0.125, 1.125], [-0.9, -0.5, 0.5, 1.5]),
        # Beyond 0.2 of the old value: no gradient where the value has moved towards its return, and
        # all of it where it moved away.
        (0.2, [0.405, 0.32, 0.32, 1.125], [-0.9, 0.0, 0.0, 1.5]),
    ],
)
def test_value_losses_and_gradients_match_hand_computation(
    value_clip: float, losses: list[float], gradients: list[float]
) -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    given = value_losses(values, old_values=OLD, returns=RETURNS, value_clip=value_clip)
    given.losses.sum().backward()
    assert given.losses.tolist() == pytest.approx(losses)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx(gradients)
    assert given.clipped.tolist() == ([False, True, True, False] if value_clip else [False] * 4)
