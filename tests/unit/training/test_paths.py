"""Samples of several paths against the same paths as samples of their own, and against a padded
step that knows which rows belong to one sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from relax_events.errors import OutOfMemory, PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.events.routed_experts import ExpertShape
from relax_events.packages.megatron.row import lay_out_row
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.packing import cut_by_cells, pack
from relax_events.training.batch.paths import split_paths
from relax_events.training.batch.shared_prefixes import PrefixSharing, cut_paths
from relax_events.training.batch.truncation import mask_excluded
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.float64_experts import use_float64_experts
from tests.unit.trainer_samples import (
    make_samples,
    plain_logprobs,
    run_config,
    tiny_model,
    token_sets,
)
from tests.unit.training.test_load_balancing import mixture, samples
from tests.unit.training.test_torch_backend import ALGORITHM, TRAINER, PaddedGrpo, backend

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


@pytest.mark.parametrize("truncated", ["mask", "drop"])
def test_a_truncated_path_is_masked_and_the_others_are_trained(truncated):
    """As if its loss mask were 0, and versions and token sets were of the others."""
    sample, *others = SAMPLES
    first = sample.path_lengths[0]
    num_first = int(sample.loss_mask[:first].sum())
    number = int(sample.loss_mask.sum())
    ids, logprobs = token_sets(np.random.default_rng(0), number)
    cut = changed(
        sample,
        truncated_paths=[0],
        topk_ids=ids,
        topk_teacher_logprobs=logprobs,
        min_policy_version=0,
        max_policy_version=1,
        version_segments=[
            VersionSegment(0, num_first - 1),
            VersionSegment(1, number - num_first + 1),
        ],
    )
    expected = changed(
        sample, loss_mask=np.where(np.arange(len(sample.tokens)) < first, 0, sample.loss_mask)
    )
    settings = ALGORITHM | {"truncated_samples": truncated, "max_token_staleness": 0}
    mine, other, trained = (backend(algorithm=settings) for _ in range(3))
    mine.accumulate([cut, *others])
    other.accumulate(
        [
            changed(
                expected,
                version_segments=[VersionSegment(1, number - num_first)],
                max_policy_version=1,
            ),
            *others,
        ]
    )
    trained.accumulate(SAMPLES)
    metrics, same = mine.step(), other.step()
    assert (metrics.loss, metrics.grad_norm) == (same.loss, same.grad_norm)
    assert trained.step().grad_norm != pytest.approx(metrics.grad_norm, rel=1e-3)
    [masked] = mask_excluded([cut], algorithm=run_config(algorithm=settings).algorithm)
    np.testing.assert_array_equal(masked.topk_ids, ids[num_first:])
    assert list(masked.version_segments) == [VersionSegment(1, number - num_first)]


def test_a_turn_that_another_path_continues_is_trained():
    """The first path was cut off after a turn that the second shares."""
    sample = changed(
        SAMPLES[0],
        tokens=np.array([9, 1, 2, 8, 3, 9, 1, 2, 7, 4, 5], np.int32),
        loss_mask=np.array([0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1], np.uint8),
        path_lengths=[5, 6],
        truncated_paths=[0],
    )
    algorithm = run_config(algorithm={"truncated_samples": "mask"}).algorithm
    [masked] = mask_excluded([sample], algorithm=algorithm)
    assert masked.loss_mask.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    both = replace(sample, truncated_paths=[0, 1], finish_reason=FinishReason.LENGTH)
    assert not mask_excluded([both], algorithm=algorithm)[0].loss_mask.any()
    last = replace(sample, truncated_paths=[1], finish_reason=FinishReason.LENGTH)
    [masked] = mask_excluded([last], algorithm=algorithm)
    assert masked.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    drop = run_config(algorithm={"truncated_samples": "drop"}).algorithm
    old = replace(last, truncated_paths=[])  # recorded before paths were named
    for cut, settings in ((last, drop), (old, drop), (old, algorithm)):
        assert not mask_excluded([cut], algorithm=settings)[0].loss_mask.any()


@pytest.mark.parametrize("lengths", [[3, 4], [0, 5], [-1, 6]])
def test_paths_that_are_not_the_tokens_are_refused(lengths):
    sample = changed(PARTS[0], tokens=np.arange(5), loss_mask=np.array([0, 1, 1, 0, 1]))
    with pytest.raises(PoisonSample, match="path_lengths must be positive and add up to 5"):
        pack([changed(sample, path_lengths=lengths)], vocab_size=256)


BUDGET = 24
IN_PASSES = {
    "clipped": {},
    "by sample": {"aggregation": "sample_mean", "entropy_coefficient": 0.05},
    "sequence ratio": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "geometric mean": {"name": "gmpo", "clip_low": 0.2, "clip_high": 0.25},
    "sequence correction": {"correction": "tis", "correction_level": "sequence"},
    "rejection": {"rejection": "k3", "rejection_high": 0.04, "old_logprobs": "actor"},
    "off-policy sequences": {"opsm_threshold": 0.02},
    "second moment": {"m2_threshold": 0.1},
    "several ids": {
        "distill_coefficient": 0.5,
        "distill_tokens": "teacher_topk",
        "distill_top_k": 4,
    },
}


def with_token_sets(sample):
    generator = np.random.default_rng(len(sample.tokens))
    ids, logprobs = token_sets(generator, int(sample.loss_mask.sum()))
    teacher = sample.ref_logprobs
    return changed(sample, topk_ids=ids, topk_teacher_logprobs=logprobs, teacher_logprobs=teacher)


@pytest.fixture
def passes(monkeypatch):
    """Return the cells of each pass of the model, and the longest path in it."""
    sizes, run = [], PolicyModel.token_logprobs

    def record(model, batch, **settings):
        sizes.append((len(np.unique(batch.cells)), int(batch.num_path_tokens.max())))
        return run(model, batch, **settings)

    monkeypatch.setattr(PolicyModel, "token_logprobs", record)
    return sizes


def trained(max_tokens, algorithm, trainer, parts, **settings):
    mine = backend(
        algorithm=algorithm,
        trainer=TRAINER | {"max_tokens_per_micro_batch": max_tokens} | trainer,
        **settings,
    )
    for _ in range(2):
        for part in parts:
            mine.accumulate(part)
        metrics = mine.step().to_metrics()
    return metrics, collect_weights(mine)


MINI_BATCHES = {"num_mini_batches": 2, "share_prompts": False}


@pytest.mark.parametrize(
    ("name", "trainer"),
    [*((name, {}) for name in IN_PASSES), ("clipped", MINI_BATCHES)],
)
def test_passes_within_the_budget_take_the_step_of_one(name, trainer, passes):
    algorithm = ALGORITHM | IN_PASSES[name]
    samples = [with_token_sets(sample) for sample in SAMPLES]
    parts = (samples[:2], samples[2:])
    whole = trained(10_000, algorithm, trainer, parts)
    assert max(cells for cells, _ in passes) > 2 * BUDGET
    passes.clear()
    cut = trained(BUDGET, algorithm, trainer, parts)
    assert all(cells <= max(BUDGET, longest) for cells, longest in passes)
    assert whole[0] == pytest.approx(cut[0], rel=1e-6, abs=1e-9)
    for one, weights in cut[1].items():
        torch.testing.assert_close(weights, whole[1][one], rtol=0, atol=1e-7)


def test_experts_are_balanced_along_each_path_whatever_its_pass(monkeypatch, passes):
    use_float64_experts(monkeypatch)
    algorithm = {"load_balancing_coefficient": 0.3}
    branched = [joined(samples()[:3]), joined(samples()[3:])]
    gradients = []
    for max_tokens in (10_000, BUDGET):
        trainer = {"max_tokens_per_micro_batch": max_tokens}
        config = run_config(mixture(), algorithm=algorithm, trainer=trainer)
        mine = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
        mine.accumulate(branched)
        gradients.append(mine._parameters.gradients.clone())
    assert passes[-1][0] <= BUDGET < passes[0][0]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("share_rows", [True, False])
@pytest.mark.parametrize("least", [None, 1, 8])
def test_slices_are_as_large_as_the_budget_allows(share_rows, least):
    generator = np.random.default_rng(1)
    stem = generator.integers(0, 9, 40)
    paths = []
    for _ in range(30):
        kept = stem[: generator.integers(0, 40)]
        tokens = np.concatenate([kept, generator.integers(0, 9, generator.integers(2, 12))])
        mask = (np.arange(len(tokens)) >= len(tokens) - 1).astype(np.uint8)
        paths.append(changed(PARTS[0], tokens=tokens.astype(np.int32), loss_mask=mask))
    sharing = None if least is None else PrefixSharing(min_tokens=least)

    def count_cells(members):
        batch = pack(members, vocab_size=9, share_rows=share_rows, sharing=sharing)
        is_one_row = share_rows or batch.tree is not None
        return len(np.unique(batch.cells)) if is_one_row else batch.input_ids.size

    slices = cut_paths(paths, max_cells=90, share_rows=share_rows, sharing=sharing)
    assert [index for part in slices for index in range(30)[part]] == list(range(30))
    assert 1 < len(slices) < 30
    for part, following in zip(slices, [*slices[1:], None], strict=True):
        assert count_cells(paths[part]) <= 90
        if following is not None:
            assert count_cells(paths[part.start : following.start + 1]) > 90
    assert [part.start for part in cut_paths(paths, max_cells=1, share_rows=True)] == list(
        range(30)
    )


class Device:
    """Has memory for passes of so many cells."""

    def __init__(self, monkeypatch, text="CUDA out of memory"):
        self.max_cells, self.error = 10_000, torch.OutOfMemoryError(text)
        run = PolicyModel.token_logprobs

        def run_on_device(model, batch, **settings):
            if len(np.unique(batch.cells)) > self.max_cells:
                raise self.error
            return run(model, batch, **settings)

        monkeypatch.setattr(PolicyModel, "token_logprobs", run_on_device)


def test_a_pass_that_does_not_fit_is_named(monkeypatch):
    device, mine = Device(monkeypatch), backend()
    mine.max_cells, device.max_cells = 40, 30
    with pytest.raises(OutOfMemory, match=r"trainer\.max_tokens_per_micro_batch") as several:
        mine.accumulate(SAMPLES[1:])
    assert several.value.sample_id == SAMPLES[1].sample_id
    assert several.value.num_paths > 1
    assert 30 < several.value.num_cells <= 40
    mine.discard()
    mine.max_cells, device.max_cells = 1, 14
    longest = max(SAMPLES[0].path_lengths)
    assert longest == 15
    with pytest.raises(
        OutOfMemory, match=f"a path of sample s0, {longest} tokens, .*run.max_failed"
    ) as single:
        mine.accumulate(SAMPLES[:1])
    assert single.value.num_paths == 1
    assert single.value.__context__ is None, "it would hold the pass's tensors"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["device", "host"]
)
def test_a_path_that_fitted_before_is_not_to_blame(monkeypatch, error):
    device, mine = Device(monkeypatch), backend()
    device.error = error
    mine.accumulate(SAMPLES[:1])
    mine.max_cells, device.max_cells = 1, 0
    with pytest.raises(type(error)):
        mine.accumulate(SAMPLES[:1])


def test_other_errors_of_a_pass_are_not_taken_for_missing_memory(monkeypatch):
    device, mine = Device(monkeypatch), backend()
    device.max_cells, device.error = 0, RuntimeError("a kernel failed")
    with pytest.raises(RuntimeError, match="a kernel failed"):
        mine.accumulate(SAMPLES)
    device.error = RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")
    with pytest.raises(OutOfMemory, match="can't allocate memory: 1 bytes"):
        mine.accumulate(SAMPLES)
