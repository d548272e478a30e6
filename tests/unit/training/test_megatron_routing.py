"""A router of megatron-core takes recorded experts, and chooses itself where there are none."""

import pytest
import torch
from torch import Tensor

from relax_events.packages.megatron.routing import Choices, LayerReplay


def choose_best(
    scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[Tensor, Tensor]:
    """As megatron-core's, whose choice by groups takes the scores of all tokens."""
    if group_topk:
        scores = scores.view(5, num_groups, -1).flatten(1)
    best = scores.topk(topk, dim=1)
    return best.values, best.indices


@pytest.mark.parametrize(("num_groups", "group_topk"), [(None, None), (2, 1)])
@pytest.mark.parametrize("routed", [[], [1, 4]])
def test_recorded_experts_are_taken_except_where_there_are_none(
    routed: list[int], num_groups: int | None, group_topk: int | None
) -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 5, requires_grad=True)
    recorded = torch.tensor([[0, 1]] * 5, dtype=torch.uint8)
    replay = LayerReplay()
    replay.choices = Choices(recorded, torch.tensor(routed, dtype=torch.int64))

    values, chosen = replay.get_replay_topk(scores, 2, num_groups, group_topk, choose_best)

    expected = [[3, 2] if token in routed else [0, 1] for token in range(5)]
    assert chosen.tolist() == expected
    torch.testing.assert_close(
        values, torch.tensor([[0.4, 0.3] if token in routed else [0.1, 0.2] for token in range(5)])
    )
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert scores.grad.nonzero().shape[0] == 10
    assert recorded.tolist() == [[0, 1]] * 5
