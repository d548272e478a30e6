"""Samples of several paths against the same paths as samples of their own, and against a padded
step that knows which rows belong to one sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from relax_events.errors import PoisonSample
from relax_events.events.routed_experts import ExpertShape
from relax_events.packages.megatron.row import lay_out_row
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.batch.packing import cut_by_cells, pack
from relax_events.training.batch.paths import split_paths
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, plain_logprobs, run_config, tiny_model
from tests.unit.training.test_torch_backend import ALGORITHM, PaddedGrpo, backend

PARTS = [
    changed(sample, temperature=0.7 + 0.05 * (index // 3))
    for index, sample in enumerate(make_samples(9, seed=5))
]
OWNERS = [0, 0, 0, 1, 1, 2, 3, 3, 4]
"""Which sample each part is a path of."""
ARRAYS = ("tokens", "loss_mask", "rollout_logprobs", "actor_logprobs", "ref_logprobs", "advantages")


def joined(parts):
    """Return samples as the paths of one sample."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    lengths = [len(part.tokens) for part in parts] if len(parts) > 1 else []
    return changed(
        parts[0],
        **arrays,
        path_lengths=lengths,
        temperature=parts[0].temperature,
        teacher_logprobs=None,
        topk_ids=None,
        topk_teacher_logprobs=None,
    )


def parts_of(owner):
    temperature = PARTS[OWNERS.index(owner)].temperature
    return [
        changed(part, temperature=temperature)
        for part, own in zip(PARTS, OWNERS, strict=True)
        if own == owner
    ]


ROWS = [part for owner in range(5) for part in parts_of(owner)]
SAMPLES = [joined(parts_of(owner)) for owner in range(5)]


class PaddedPaths(PaddedGrpo):
    """A sample weighs once, however many rows it has."""

    def mean(self, values, mask):
        if self.aggregation == "token_mean":
            return super().mean(values, mask)
        owners = torch.tensor(OWNERS)
        sums = torch.zeros(5, dtype=values.dtype).index_add(0, owners, (values * mask).sum(1))
        counts = torch.zeros(5, dtype=values.dtype).index_add(0, owners, mask.sum(1))
        return (sums / counts).mean()


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_a_sample_weighs_once_however_many_paths_it_has(aggregation):
    mine = backend(algorithm=ALGORITHM | {"aggregation": aggregation})
    other = PaddedPaths(aggregation=aggregation, estimator="k3")
    for _ in range(2):
        for part in (SAMPLES[:2], SAMPLES[2:]):
            mine.accumulate(part)
        metrics, expected = mine.step().to_metrics(), other.step(ROWS)
        assert {name: metrics[name] for name in expected} == pytest.approx(
            expected, rel=1e-5, abs=1e-7
        )


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_each_path_is_scored_as_a_sequence_of_its_own(max_tokens):
    model = run_config().model
    scorer = LogprobScorer(tiny_model(), model=model, threads=1, max_tokens=max_tokens)
    for sample, own in zip(SAMPLES, scorer.score(SAMPLES), strict=True):
        expected = [
            plain_logprobs(path.tokens, sample.temperature) * path.loss_mask
            for path in split_paths([sample])
        ]
        np.testing.assert_allclose(own, np.concatenate(expected), atol=2e-5)
    best = scorer.score_topk(SAMPLES, num_ids=3, ids_of="model")
    for sample, scores in zip(SAMPLES, best, strict=True):
        assert scores.ids is not None
        assert scores.ids.shape == (int(sample.loss_mask.sum()), 3)
        given = scorer.score_topk(
            [changed(sample, topk_ids=scores.ids)], num_ids=3, ids_of="sample"
        )[0]
        np.testing.assert_allclose(given.id_logprobs, scores.id_logprobs, atol=2e-5)


def test_both_backends_read_paths_as_they_read_samples():
    apart, together = (pack(samples, vocab_size=256) for samples in (ROWS, SAMPLES))
    for name in ("input_ids", "position_ids", "loss_positions", "targets", "temperatures"):
        np.testing.assert_array_equal(getattr(apart, name), getattr(together, name))
    assert together.num_loss_tokens.tolist() == [int(one.loss_mask.sum()) for one in SAMPLES]
    first, second = (lay_out_row(batch, multiple=8) for batch in (apart, together))
    np.testing.assert_array_equal(first.tree.ends, second.tree.ends)
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_experts_are_replayed_within_paths():
    shape = ExpertShape(num_layers=2, top_k=1, num_experts=8)
    generator = np.random.default_rng(0)
    sample = SAMPLES[0]
    experts = generator.integers(0, 8, (len(sample.tokens) - 1, 2, 1)).astype(np.uint8)
    batch = pack([replace(sample, routed_experts=experts)], vocab_size=256, experts=shape)
    assert batch.experts is not None
    ends = np.cumsum(sample.path_lengths) - 1
    read = np.setdiff1d(np.arange(len(sample.tokens)), ends)
    assert not batch.experts.is_replayed[batch.cells[ends]].any()
    assert batch.experts.is_replayed[batch.cells[read]].all()
    np.testing.assert_array_equal(batch.experts.experts[batch.cells[read]], experts[read])


def test_a_part_has_a_row_for_each_path():
    longest = max(len(one.tokens) for one in PARTS)
    parts = cut_by_cells(SAMPLES, max_cells=longest * 3)
    sizes = [sum(len(one.path_lengths) or 1 for one in part) for part in parts]
    assert sorted(one.sample_id for part in parts for one in part) == sorted(
        one.sample_id for one in SAMPLES
    )
    assert max(sizes) == 3


@pytest.mark.parametrize("lengths", [[3, 4], [0, 5], [-1, 6]])
def test_paths_that_are_not_the_tokens_are_refused(lengths):
    sample = changed(PARTS[0], tokens=np.arange(5), loss_mask=np.array([0, 1, 1, 0, 1]))
    with pytest.raises(PoisonSample, match="path_lengths must be positive and add up to 5"):
        pack([changed(sample, path_lengths=lengths)], vocab_size=256)
