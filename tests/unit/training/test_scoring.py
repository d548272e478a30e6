"""The scorer against plain forwards of one sequence at a time."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from relax_events.errors import OutOfMemory, PoisonSample, WeightsError
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.scoring import LogprobScorer
from tests.event_samples import changed
from tests.unit.trainer_samples import (
    make_samples,
    plain_logprobs,
    plain_model,
    run_config,
    tiny_model,
)

SAMPLES = make_samples(9, seed=4, temperature=0.8)


@dataclass(frozen=True)
class SomeWeights:
    policy_version: int
    tensors: dict[str, torch.Tensor]
    digest: bytes = b""
    base_digest: bytes = b""


def scorer(path=None, max_tokens=40):
    return LogprobScorer(
        path or tiny_model(), model=run_config().model, threads=1, max_tokens=max_tokens
    )


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_scores_match_unpacked_samples_in_any_packing(max_tokens):
    scores = scorer(max_tokens=max_tokens).score(SAMPLES)
    for sample, values in zip(SAMPLES, scores, strict=True):
        assert values.dtype == np.float32
        np.testing.assert_allclose(
            values, plain_logprobs(sample.tokens, 0.8) * sample.loss_mask, atol=2e-5
        )


def test_score_is_zero_outside_the_mask():
    for sample, values in zip(SAMPLES, scorer().score(SAMPLES), strict=True):
        assert not values[sample.loss_mask == 0].any()
        assert (values[sample.loss_mask == 1] < 0).all()


def test_score_takes_samples_without_loss_tokens():
    bare = changed(SAMPLES[0], loss_mask=np.zeros_like(SAMPLES[0].loss_mask))
    first, second, third = scorer().score([bare, SAMPLES[1], bare])
    assert not first.any()
    assert second.any()
    assert not third.any()


def test_score_of_no_samples_is_empty():
    assert scorer().score([]) == []


def test_score_names_the_sample_that_can_not_be_scored():
    with pytest.raises(PoisonSample, match="sample s2: temperature must be > 0"):
        scorer().score([*SAMPLES[:2], changed(SAMPLES[2], temperature=-1.0)])


def whole_logprobs(sample):
    """Return the log-probabilities of the whole vocabulary at each loss token, from a plain
    forward."""
    with torch.no_grad():
        logits = (
            plain_model(tiny_model())(
                torch.from_numpy(sample.tokens.astype(np.int64))[None]
            ).logits[0]
            / 0.8
        )
    return logits.log_softmax(-1).numpy()[np.flatnonzero(sample.loss_mask) - 1]


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_score_topk_gives_the_models_own_most_probable_ids(max_tokens):
    found = scorer(max_tokens=max_tokens).score_topk(SAMPLES, num_ids=3, ids_of="model")
    for sample, scores, plain in zip(SAMPLES, found, scorer().score(SAMPLES), strict=True):
        expected = whole_logprobs(sample)
        assert scores.ids.dtype == np.int32
        np.testing.assert_array_equal(scores.ids, np.argsort(-expected, axis=-1)[:, :3])
        np.testing.assert_allclose(
            scores.id_logprobs, -np.sort(-expected, axis=-1)[:, :3], atol=2e-5
        )
        np.testing.assert_allclose(scores.logprobs, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_score_topk_scores_the_given_ids_of_each_sample(max_tokens):
    found = scorer(max_tokens=max_tokens).score_topk(SAMPLES, num_ids=4, ids_of="sample")
    for sample, scores in zip(SAMPLES, found, strict=True):
        assert scores.ids is None
        expected = np.take_along_axis(
            whole_logprobs(sample), sample.topk_ids[:, :4].astype(np.int64), -1
        )
        np.testing.assert_allclose(scores.id_logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_score_topk_of_both_adds_the_models_most_probable_other_ids(max_tokens):
    found = scorer(max_tokens=max_tokens).score_topk(SAMPLES, num_ids=4, ids_of="both")
    for sample, scores in zip(SAMPLES, found, strict=True):
        whole = whole_logprobs(sample)
        for ids, logprobs, given, row in zip(
            scores.ids, scores.id_logprobs, sample.topk_ids, whole, strict=True
        ):
            ranked = np.argsort(-row)
            others = [token for token in ranked if token not in given[:4]][:4]
            assert ids.tolist() == [*given[:4], *others]
            assert set(ranked[:4]) <= set(ids), "all that the model itself would choose"
            np.testing.assert_allclose(logprobs, row[ids], atol=2e-5)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (None, "sample s1 has no topk_ids, and the algorithm needs them"),
        (
            np.zeros((1, 4), np.int32),
            r"sample s1: topk_ids must be \d+ loss tokens by at least 4 ids, got \(1, 4\)",
        ),
        (
            "wild",
            r"sample s1: topk_ids must be 0 to \d+, got 0 to 99999; do policy and teacher share a vocabulary",
        ),
    ],
)
def test_score_topk_error_names_the_sample_with_invalid_ids(ids, text):
    if isinstance(ids, str):
        ids = np.where(np.arange(4) == 0, 99_999, 0) + np.zeros_like(SAMPLES[1].topk_ids[:, :4])
    with pytest.raises(PoisonSample, match=text):
        scorer().score_topk(
            [SAMPLES[0], changed(SAMPLES[1], topk_ids=ids)], num_ids=4, ids_of="sample"
        )


def test_load_weights_switches_to_the_other_version(tmp_path):
    other = scorer(make_tiny(tmp_path, corpus=["12=21"], hidden_size=32, seed=4))
    mine = scorer()
    assert mine.policy_version == 0
    mine.load_weights(SomeWeights(5, dict(other._model.module.named_parameters())))
    assert mine.policy_version == 5
    for values, expected in zip(mine.score(SAMPLES), other.score(SAMPLES), strict=True):
        np.testing.assert_array_equal(values, expected)


def test_load_weights_keeps_version_and_scores_when_weights_do_not_match():
    mine = scorer()
    before = mine.score(SAMPLES)
    with pytest.raises(WeightsError, match="the weights lack"):
        mine.load_weights(SomeWeights(5, {}))
    assert mine.policy_version == 0
    for values, expected in zip(mine.score(SAMPLES), before, strict=True):
        np.testing.assert_array_equal(values, expected)


def test_batch_composition_changes_scores_only_by_rounding():
    samples = make_samples(24, seed=9)
    together = scorer(max_tokens=10_000).score(samples)
    generator = np.random.default_rng(0)
    for max_tokens in (1, 64, 10_000):
        order = generator.permutation(len(samples))
        shuffled = scorer(max_tokens=max_tokens).score([samples[index] for index in order])
        for index, values in zip(order, shuffled, strict=True):
            np.testing.assert_allclose(values, together[index], rtol=0, atol=1e-5)


def test_scores_of_single_samples_are_bitwise_equal_in_any_order():
    samples = make_samples(12, seed=9)
    scores = scorer(max_tokens=1).score(samples)
    for values, again in zip(
        scores, reversed(scorer(max_tokens=1).score(samples[::-1])), strict=True
    ):
        assert values.tobytes() == again.tobytes()


@pytest.fixture
def device(monkeypatch):
    """Has memory for passes of so many cells; keeps the cells of the passes."""
    cells, run = [], PolicyModel.token_logprobs

    def run_on_device(model, batch, **settings):
        cells.append(batch.input_ids.size)
        if cells[-1] > max_cells[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(model, batch, **settings)

    max_cells = [10_000]
    monkeypatch.setattr(PolicyModel, "token_logprobs", run_on_device)
    return max_cells, cells


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_pass_that_does_not_fit_is_scored_in_halves(device, num_top):
    def score():
        mine = scorer(max_tokens=10_000)
        if num_top:
            return [one.id_logprobs for one in mine.score_topk(SAMPLES, num_ids=3, ids_of="model")]
        return mine.score(SAMPLES)

    max_cells, cells = device
    expected = score()
    max_cells[0] = longest = max(-(-len(sample.tokens) // 8) * 8 for sample in SAMPLES)
    assert max(cells) > longest
    for values, whole in zip(score(), expected, strict=True):
        np.testing.assert_allclose(values, whole, rtol=0, atol=1e-5)


def test_a_path_that_does_not_fit_alone_is_named(device):
    max_cells, _ = device
    max_cells[0] = 16
    large = [sample for sample in SAMPLES if len(sample.tokens) > max_cells[0]]
    mine = scorer(max_tokens=10_000)
    with pytest.raises(OutOfMemory) as error:
        mine.score(SAMPLES)
    assert error.value.sample_id in {sample.sample_id for sample in large}
    assert error.value.num_paths == 1
    assert "activation_checkpointing" not in str(error.value), "which costs memory only to train"
    mine.score([sample for sample in SAMPLES if sample not in large])


def test_a_path_that_was_scored_before_is_not_to_blame(device):
    max_cells, _ = device
    mine = scorer(max_tokens=1)
    mine.score(SAMPLES)
    max_cells[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        mine.score(SAMPLES)
