"""Token sequences with common prefixes in one row: what each token attends to, and results and
gradients as without sharing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode

from relax_events.events.parts import MediaRef
from relax_events.events.routed_experts import ExpertShape
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend import tree_attention
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.tree_attention import TreeAttention
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.packing import PackedBatch, in_one_row, pack
from relax_events.training.batch.paths import split_paths
from relax_events.training.batch.prefix_tree import PrefixTree, count_cells, join_short
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.float64_experts import use_float64_experts
from tests.folders import kept_folder
from tests.unit.trainer_samples import (
    make_samples,
    plain_logprobs,
    route_by_tokens,
    run_config,
    tiny_model,
)

ALL = PrefixSharing(min_tokens=1)
CPU = torch.device("cpu")
FIELDS = ("rollout_logprobs", "actor_logprobs", "ref_logprobs", "advantages")


def sample_of(tokens: Any, mask: Any, *, index: int = 0, **given: Any) -> Any:
    """Return a sample with these tokens and random values."""
    draw, mask = np.random.default_rng(len(tokens) + 100 * index), np.asarray(mask, np.uint8)
    values = {name: (mask * draw.normal(size=len(mask))).astype(np.float32) for name in FIELDS}
    first = int(np.argmax(mask)) if mask.any() else len(mask)
    made = make_samples(1)[0]
    key = replace(made.key, sample_id=f"s{index}", prompt_group_id=f"g{index}")
    return changed(
        made,
        key=key,
        tokens=np.asarray(tokens, np.int32),
        loss_mask=mask,
        num_prompt_tokens=first,
        teacher_logprobs=None,
        topk_ids=None,
        topk_teacher_logprobs=None,
        **values,
        **given,
    )


@st.composite
def episodes(draw: st.DrawFn) -> list[Any]:
    """Draw samples whose paths branch at random: each path continues a prefix of an earlier one of
    any sample, or shares nothing. There are few token ids, so that some continue with the same ones.
    """
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    known: list[np.ndarray[Any, Any]] = []
    samples = []
    for index in range(draw(st.integers(1, 4))):
        paths, masks = [], []
        for _ in range(draw(st.integers(1, 4))):
            source = known[generator.integers(len(known))] if known else np.zeros(0, np.int64)
            start = source[: generator.integers(len(source) + 1)]
            own = generator.integers(0, 3, generator.integers(0 if len(start) else 1, 8))
            path = np.concatenate([start, own]).astype(np.int64)
            mask = generator.random(len(path)) < 0.5
            mask[0] = False
            known.append(path)
            paths.append(path)
            masks.append(mask)
        lengths = [len(path) for path in paths] if len(paths) > 1 else []
        samples.append(
            sample_of(
                np.concatenate(paths), np.concatenate(masks), index=index, path_lengths=lengths
            )
        )
    return samples


def seen_cells(batch: PackedBatch) -> dict[int, list[int]]:
    """Return the cells that each cell attends to."""
    assert batch.tree is not None
    seen = {}
    for queries in batch.tree.queries(0, batch.input_ids.size, max_tokens=3):
        keys = [cell for start, end in queries.keys for cell in range(start, end)]
        for number, cell in enumerate(range(queries.start, queries.stop)):
            seen[cell] = keys[: len(keys) - (queries.stop - queries.start) + number + 1]
    return seen


@given(episodes())
def test_each_token_attends_to_its_own_sequence(samples: list[Any]) -> None:
    batch = pack(samples, vocab_size=256, sharing=ALL)
    paths = split_paths(samples)
    prefixes = {
        tuple(path.tokens[:end]) for path in paths for end in range(1, len(path.tokens) + 1)
    }
    if batch.tree is None:
        assert len(prefixes) == batch.num_tokens
        return
    assert batch.input_ids.shape == (1, len(prefixes)), "each prefix stands in the row once"
    seen, ids, first = seen_cells(batch), batch.input_ids[0], 0
    for path in paths:
        cells = batch.cells[first : first + len(path.tokens)]
        for offset, cell in enumerate(cells.tolist()):
            np.testing.assert_array_equal(ids[seen[cell]], path.tokens[: offset + 1])
            np.testing.assert_array_equal(batch.position_ids[0, seen[cell]], np.arange(offset + 1))
        first += len(cells)


@given(episodes(), st.integers(-1, 60))
def test_joined_queries_see_what_each_of_them_sees(samples: list[Any], max_cells: int) -> None:
    batch = pack(samples, vocab_size=256, sharing=ALL)
    if batch.tree is None:
        return
    expected, pieces = seen_cells(batch), list(batch.tree.queries(0, batch.input_ids.size))
    blocks = list(join_short(pieces, max_cells=max_cells))
    assert [piece for block in blocks for piece in block.pieces] == pieces
    for block in blocks:
        keys = np.concatenate([np.arange(start, end) for start, end in block.keys])
        seen = block.seen()
        for cell in range(block.start, block.stop):
            assert keys[seen[cell - block.start]].tolist() == expected[cell]
        needed = sum((one.stop - one.start) * count_cells(one.keys) for one in block.pieces)
        assert seen.size - needed == block.num_cells <= max(max_cells, 0) * len(block.pieces)


@given(episodes(), st.integers(2, 6))
def test_common_prefixes_shorter_than_the_least_are_not_shared(
    samples: list[Any], least: int
) -> None:
    batch = pack(samples, vocab_size=256, sharing=PrefixSharing(min_tokens=least))
    paths = split_paths(samples)
    common = [
        len(np.flatnonzero(np.cumprod(one.tokens[:limit] == other.tokens[:limit])))
        for index, one in enumerate(paths)
        for other in paths[:index]
        for limit in [min(len(one.tokens), len(other.tokens))]
    ]
    assert (batch.tree is not None) == (max(common, default=0) >= least)


def test_model_on_a_cpu_shares_what_is_worth_it_there() -> None:
    model = PolicyModel(tiny_model(), config=run_config().model, device=CPU)
    assert model.prefix_sharing == PrefixSharing(min_tokens=8)


def test_row_of_three_sequences_is_as_documented() -> None:
    texts = "pppaaubb", "pppaavc", "pppddd"
    samples = [
        sample_of(
            [ord(one) for one in text],
            [0] * 7 + [1] if text == texts[0] else [0] * len(text),
            index=index,
        )
        for index, text in enumerate(texts)
    ]
    batch = pack(samples, vocab_size=256, sharing=ALL)
    assert batch.tree is not None
    assert "".join(map(chr, batch.input_ids[0])) == "pppaaubbvcddd"
    assert batch.tree.ends.tolist() == [8, 10, 13]
    assert batch.tree.forks.tolist() == [-1, 4, 2]


def test_tokens_through_other_experts_are_not_shared() -> None:
    shape = ExpertShape(num_layers=2, top_k=2, num_experts=8)
    experts = np.random.default_rng(0).integers(0, 8, (5, 2, 2)).astype(np.uint8)
    other = experts.copy()
    other[3, 1, 0] ^= 1
    tokens, mask = [1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1]
    samples = [
        sample_of(tokens, mask, index=index, routed_experts=own)
        for index, own in enumerate((experts, other))
    ]
    batch = pack(samples, vocab_size=256, sharing=ALL, experts=shape)
    assert batch.input_ids.size == 6 + 3
    assert batch.experts is not None
    for number, own in enumerate((experts, other)):
        np.testing.assert_array_equal(
            batch.experts.experts[batch.cells[6 * number : 6 * number + 5]], own
        )
    # the engine read no last token, so it is not the same as one with a successor
    samples[1] = sample_of(tokens[:4], mask[:4], index=1, routed_experts=experts[:3])
    assert pack(samples, vocab_size=256, sharing=ALL, experts=shape).input_ids.size == 6 + 1


@pytest.mark.parametrize(("digests", "num_shared"), [((1, 1), 4), ((1, 2), 0)])
def test_sequences_with_other_images_share_nothing_where_their_places_are_unknown(
    digests: tuple[int, int], num_shared: int
) -> None:
    samples = [
        sample_of(
            [1, 2, 3, 4, 5 + index],
            [0, 0, 0, 0, 1],
            index=index,
            media=[MediaRef("file:///a.png", bytes([digest]) * 32, "image/png", 3)],
            num_prompt_media=1,
        )
        for index, digest in enumerate(digests)
    ]
    assert pack(samples, vocab_size=256, sharing=ALL).input_ids.size == 10 - num_shared


@cache
def load() -> PolicyModel:
    """Return a model that computes everything in float64; transformers' norms use float32."""
    model = PolicyModel(tiny_model(), config=run_config().model, device=CPU, dtype=torch.float64)
    for part in model.module.modules():
        if hasattr(part, "variance_epsilon"):
            part.forward = partial(norm, part)
    return model


def norm(part: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Scale to a root mean square of 1."""
    mean = hidden.square().mean(-1, keepdim=True)
    scaled: torch.Tensor = part.weight * hidden * torch.rsqrt(mean + part.variance_epsilon)
    return scaled


@settings(max_examples=25, deadline=None)
@given(episodes())
def test_logprobs_and_gradients_are_those_of_sequences_apart(samples: list[Any]) -> None:
    if not sum(int(sample.loss_mask.sum()) for sample in samples):
        return
    found = []
    for sharing in (ALL, None):
        model = load()
        model.module.zero_grad()
        batch = pack(samples, vocab_size=256, sharing=sharing)
        logprobs = model.token_logprobs(batch, entropy_gradient=True).logprobs
        logprobs.square().sum().backward()
        found.append((logprobs.detach(), [one.grad for one in model.module.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
    expected = [
        plain_logprobs(path.tokens)[np.asarray(path.loss_mask) == 1]
        for path in split_paths(samples)
    ]
    np.testing.assert_allclose(found[0][0], np.concatenate(expected), atol=5e-6)


def branched_samples() -> list[Any]:
    """Two episodes of three paths each, behind one system prompt of 20 tokens."""
    draw = np.random.default_rng(3)
    system, samples = draw.integers(0, 256, 20), []
    for index in range(2):
        first = np.concatenate([system, draw.integers(0, 256, 12)])
        paths = [
            np.concatenate([first[:end], draw.integers(0, 256, own)])
            for end, own in ((32, 6), (28, 9), (32, 4))
        ]
        masks = [np.arange(len(path)) >= end for path, end in zip(paths, (24, 30, 33), strict=True)]
        samples.append(
            sample_of(
                np.concatenate(paths),
                np.concatenate(masks),
                index=index,
                path_lengths=[len(path) for path in paths],
            )
        )
    return samples


def test_gradients_through_replayed_experts_are_those_of_paths_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_float64_experts(monkeypatch)
    path = make_tiny(
        kept_folder("mixture"), corpus=["12=21"], family="qwen3_moe", hidden_size=32, seed=4
    )
    config = run_config(path).model.model_copy(update={"routing_replay": "rollout"})
    model = PolicyModel(path, config=config, device=CPU, dtype=torch.float64)
    shape = model.experts
    assert shape is not None
    samples = [route_by_tokens(sample, shape) for sample in branched_samples()]
    found = []
    for sharing in (ALL, None):
        model.module.zero_grad()
        batch = pack(samples, vocab_size=256, sharing=sharing, experts=shape)
        logprobs = model.token_logprobs(batch).logprobs
        logprobs.square().sum().backward()
        gradients = [
            one.grad.flatten() for one in model.module.parameters() if one.grad is not None
        ]
        found.append((logprobs.detach(), torch.cat(gradients)))
        assert (batch.input_ids.size < 150) == (sharing is not None)
    for mine, apart in zip(*found, strict=True):  # norms and routers compute in float32
        assert float((mine - apart).norm()) < 1e-6 * float(apart.norm())


@pytest.mark.parametrize("recomputed", ["none", "selective", "whole"])
def test_train_step_is_equal_with_and_without_shared_prefixes(recomputed: str) -> None:
    metrics, weights = [], []
    for is_shared in (True, False):
        config = run_config(
            algorithm={"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
            trainer={"share_prompts": is_shared, "activation_checkpointing": recomputed},
        )
        backend = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
        backend.accumulate(branched_samples())
        metrics.append(backend.step())
        weights.append(collect_weights(backend))
    assert metrics[0].num_tokens == metrics[1].num_tokens
    assert metrics[0].loss == pytest.approx(metrics[1].loss, rel=1e-6)
    assert metrics[0].grad_norm == pytest.approx(metrics[1].grad_norm, rel=1e-6)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-6, atol=1e-6)


def random_tree() -> tuple[PrefixTree, list[list[int]]]:
    """Return a tree with runs longer than a mask, and the cells of each sequence."""
    tree = PrefixTree(np.array([700, 1300, 1305, 1900]), np.array([-1, 199, 1299, -1]))
    first, second = list(range(700)), list(range(200)) + list(range(700, 1300))
    return tree, [first, second, second + list(range(1300, 1305)), list(range(1305, 1900))]


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    ("takes_mask", "cells_of_a_call"), [(True, 1024), (True, -1), (True, 10**9), (False, -1)]
)
def test_attention_of_parts_is_that_of_each_sequence_alone(
    num_parts: int, takes_mask: bool, cells_of_a_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "CELLS_OF_A_CALL", cells_of_a_call)
    tree, sequences = random_tree()
    length = 1920  # with padding
    query, key, value = (
        torch.randn(1, heads, length, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    bounds = [(0, length)] if num_parts == 1 else [(0, 480), (1440, length), (480, 1440)]
    attend = TreeAttention(tree, bounds, device=CPU)
    attend._takes_mask = takes_mask  # as on a GPU, whose kernels need none
    order = [cell for bound in bounds for cell in range(*bound)]
    output = attend(query[:, :, order], key, value)
    weights = torch.randn(output.shape, dtype=torch.float64)
    whole = torch.zeros_like(output)
    for cells in sequences:
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(part[:, :, cells] for part in (query, key, value)), is_causal=True, enable_gqa=True
        )
        whole = whole.index_copy(2, torch.tensor(cells), alone)
    torch.testing.assert_close(output, whole[:, :, order])
    gradients = [
        torch.autograd.grad((result * weights).sum(), (query, key, value))
        for result in (output, whole[:, :, order])
    ]
    torch.testing.assert_close(*gradients)


class CountWritten(TorchDispatchMode):
    """Counts the values that operations write to memory of their own."""

    num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self.num_values += result.numel()
        return result


def count_written_backward(num_runs: int) -> int:
    """Return how many values the backward pass over short runs of one prompt writes."""
    ends = 32 + 8 * np.arange(1, num_runs + 1)
    attend = TreeAttention(
        PrefixTree(ends, np.array([-1] + [31] * (num_runs - 1))), [(0, int(ends[-1]))], device=CPU
    )
    row = torch.randn(1, 2, int(ends[-1]), 8, requires_grad=True)
    output = attend(row, row, row).sum()
    with CountWritten() as written:
        output.backward()
    return written.num_values


def test_backward_of_attention_writes_in_proportion_to_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_attention, "CELLS_OF_A_CALL", -1)
    assert count_written_backward(128) < 2.2 * count_written_backward(64)


@pytest.mark.parametrize(
    ("settings_of_layers", "reason"),
    [
        (
            {
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            "layers of sliding_attention don't attend to all earlier tokens alone",
        ),
        ({}, "only 'sdpa' attends along prefix trees"),
    ],
)
def test_model_that_cannot_attend_along_a_tree_shares_nothing_and_says_why(
    tmp_path: Path, settings_of_layers: dict[str, Any], reason: str
) -> None:
    path = make_tiny(tmp_path / "model", corpus=["12=21"], hidden_size=32, seed=3)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | settings_of_layers))
    config = run_config().model
    if not settings_of_layers:
        config = config.model_copy(update={"attention": "eager"})
    with capture_logs() as logs:
        assert PolicyModel(path, config=config, device=CPU).prefix_sharing is None
    (logged,) = (line for line in logs if line["event"] == "prefixes.not_shared")
    assert reason in logged["reason"]


def test_model_whose_attention_is_more_than_a_softmax_shares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_attention, "NOT_SUPPORTED", ("scaling",))
    model = PolicyModel(tiny_model(), config=run_config().model, device=CPU)
    assert model.shares_rows
    assert model.prefix_sharing is None


def test_rows_end_to_end_are_computed_sequence_by_sequence() -> None:
    """As on a GPU, where rows are long."""
    samples = [
        sample_of(range(2, 2 + length), [0, *[1] * (length - 1)], index=index)
        for index, length in enumerate([11, 4, 5, 9, 3, 2])
    ]
    model = PolicyModel(tiny_model(), config=run_config().model, device=CPU, dtype=torch.float64)
    rows = pack(samples, vocab_size=256, row_multiple=4)
    row = in_one_row(rows)
    assert len(rows.input_ids) > 1
    assert row.input_ids.shape == (1, rows.input_ids.size)
    assert row.tree is not None
    seen = seen_cells(row)
    for cell in rows.cells.tolist():
        first = cell - int(rows.position_ids.ravel()[cell])
        assert seen[cell] == list(range(first, cell + 1))
    expected, found = (model.token_logprobs(batch) for batch in (rows, row))
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.entropies, expected.entropies, rtol=1e-9, atol=1e-9)
