"""The engine's attention, experts and rows against reference implementations."""

import numpy as np
import pytest
import torch
from engine_requests import plain_model, tiny_model
from torch.nn.functional import softmax

from relax_events.config import SamplingConfig
from relax_events.engines.requests import SampleState
from relax_events.engines.transformers.rows import RowTable
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.models.layers import grouped_sdpa, padded_experts


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_grouped_query_attention_matches_softmax_over_shared_keys(
    num_heads: int, num_kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, num_heads, 1, 16, generator=generator)
    keys, values = (torch.randn(3, num_kv_heads, 32, 16, generator=generator) for _ in range(2))
    lengths = torch.tensor([1, 20, 32])
    mask = torch.where(torch.arange(32) < lengths[:, None], 0.0, -torch.inf)[:, None, None]
    output, _ = grouped_sdpa(torch.nn.Identity(), query, keys, values, mask, scaling=0.25)
    assert output.shape == (3, 1, num_heads, 16)
    for row, length in enumerate(lengths.tolist()):
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            weights = softmax(
                0.25 * keys[row, shared, :length].double() @ query[row, head, 0].double(), dim=0
            )
            torch.testing.assert_close(
                output[row, 0, head].double(),
                weights @ values[row, shared, :length].double(),
                atol=1e-5,
                rtol=1e-5,
            )


def test_padded_experts_match_the_experts_of_the_model() -> None:
    layer = plain_model(tiny_model("qwen3_moe")).model.layers[0].mlp.experts  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 32, generator=generator, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(11)])
    weights = torch.rand(11, 2, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(
            padded_experts(layer, hidden, chosen, weights), layer(hidden, chosen, weights)
        )


def sample(
    name: str,
    *,
    seed: int = 0,
    stops: tuple[int, ...] = (),
    limit: int = 8,
    prefix: tuple[int, ...] = (),
) -> SampleState:
    return SampleState(
        order=0,
        sample_id=name,
        prompt_group_id="g",
        prompt_tokens=np.array([5, 6, 7], np.int32),
        seed=seed,
        sampling=SamplingConfig(max_new_tokens=32),
        stop_token_ids=stops,
        max_new_tokens=limit,
        tokens=np.array(prefix, np.int32),
        logprobs=-np.ones(len(prefix), np.float32),
        segments=(VersionSegment(0, len(prefix)),) if prefix else (),
        is_input=np.ones(3, bool),
    )


def table_of(*samples: SampleState) -> RowTable:
    table = RowTable(max_rows=8, max_tokens=16)
    for one in samples:
        table.add(one, policy_version=1)
    return table


def record(table: RowTable, tokens: list[int]) -> list[int]:
    return table.record(
        slice(0, len(tokens)), np.array(tokens), np.full(len(tokens), -0.5, np.float32)
    ).tolist()


def test_rows_end_on_stop_token_length_or_non_finite_logprob() -> None:
    table = table_of(
        sample("a", stops=(9,)), sample("b", stops=(8, 10)), sample("c", limit=2), sample("d")
    )
    assert record(table, [8, 9, 1, 1]) == []
    assert record(table, [9, 1, 1, 1]) == [0, 2]
    nothing = np.array([-0.5, -0.5, -0.5, np.nan], np.float32)
    assert table.record(slice(0, 4), np.array([1, 10, 1, 1]), nothing).tolist() == [1, 2, 3]


def test_row_table_is_compacted_when_samples_are_removed() -> None:
    table = table_of(*(sample(name) for name in "abcde"))
    record(table, [1, 2, 3, 4, 5])
    left, sources, targets = table.remove([0, 2, 4])
    assert [(one.sample_id, one.tokens.tolist()) for one in left] == [
        ("a", [1]),
        ("c", [3]),
        ("e", [5]),
    ]
    assert (sources, targets) == ([3], [0])
    assert [one.sample_id for one in table.samples] == ["d", "b"]
    assert table.next_tokens[:2].tolist() == [4, 2]
    record(table, [40, 20])
    left, sources, targets = table.remove([0, 1])
    assert [one.tokens.tolist() for one in left] == [[4, 40], [2, 20]]
    assert (sources, targets, table.num_rows) == ([], [], 0)


def test_row_positions_include_prompt_and_prefix() -> None:
    table = table_of(sample("a"), sample("b", prefix=(1, 2)))
    record(table, [3, 3])
    # The newest token follows prompt and prefix.
    assert table.positions[:2].tolist() == [3, 5]


def test_version_segments_merge_adjacent_tokens_of_the_same_kind() -> None:
    table = table_of(sample("a", prefix=(1, 2)))
    record(table, [3])
    table.mark_version(2)
    table.mark_version(3)
    record(table, [4])
    record(table, [5])
    ((left,), _, _) = table.remove([0])
    assert left.segments == (
        VersionSegment(0, 2),
        VersionSegment(1, 1),
        VersionSegment(3, 2, kept_cache=True),
    )
    table.add(left, policy_version=3)
    record(table, [6])
    ((left,), _, _) = table.remove([0])
    assert left.segments[-2:] == (VersionSegment(3, 2, kept_cache=True), VersionSegment(3, 1))
    assert left.finish_reason is None
    assert sample("b", limit=1, prefix=(4,)).finish_reason is FinishReason.LENGTH
