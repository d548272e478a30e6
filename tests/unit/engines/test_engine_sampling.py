"""Token sampling: the right distribution, from the row's own random stream alone."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_events.engines.transformers import sampling
from relax_events.engines.transformers.sampling import RowSampling, sample_tokens, uniforms

NUM_DRAWS = 20_000


def rows(
    num_rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> RowSampling:
    return RowSampling(
        np.full(num_rows, temperature, np.float32),
        np.full(num_rows, top_p, np.float32),
        np.full(num_rows, top_k, np.int64),
    )


def frequencies(probabilities: list[float], **settings: float) -> NDArray[np.float64]:
    """Sample many times from one distribution; each sample is a row with its own seed."""
    logits = torch.tensor(probabilities).log().expand(NUM_DRAWS, -1)
    numbers = uniforms(np.arange(NUM_DRAWS, dtype=np.uint64), np.zeros(NUM_DRAWS, np.int64))
    tokens, _ = sample_tokens(logits, numbers, sampling=rows(NUM_DRAWS, **settings))  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=len(probabilities)) / NUM_DRAWS


def splitmix64(state: int) -> Iterator[int]:
    """Step through the generator in Python's integers, as its authors wrote it in C."""
    word = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & word
        value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
        yield value ^ (value >> 31)


def test_uniforms_are_splitmix64_of_seed_and_position() -> None:
    # First outputs for this seed as published with the reference implementation.
    assert list(islice(splitmix64(1234567), 3)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    for seed in (0, 1234567, 2**64 - 1):
        stream = splitmix64(next(splitmix64(seed)))
        expected = [value / 2**64 for value in islice(stream, 5)]
        observed = uniforms(np.full(5, seed, np.uint64), np.arange(5))
        np.testing.assert_allclose(observed, expected, rtol=0, atol=2.0**-52)


def test_uniforms_are_uniform_along_seeds_and_along_positions() -> None:
    counts = np.arange(NUM_DRAWS)
    zeros = np.zeros(NUM_DRAWS, np.int64)
    for numbers in (
        uniforms(counts.astype(np.uint64), zeros),
        uniforms(zeros.astype(np.uint64), counts),
    ):
        distance = np.abs(np.sort(numbers) - (counts + 0.5) / NUM_DRAWS).max()
        assert distance * np.sqrt(NUM_DRAWS) < 1.95  # Kolmogorov-Smirnov at one in a thousand
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_sampled_tokens_follow_the_distribution() -> None:
    expected = np.array([0.5, 0.25, 0.15, 0.1])
    observed = frequencies(expected.tolist())
    assert (
        NUM_DRAWS * ((observed - expected) ** 2 / expected).sum() < 16.27
    )  # chi-squared with 3 degrees of freedom at one in a thousand


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 2}, [0.0, 0.6, 0.0, 0.4]),  # 0.3 and 0.2 of 0.5
        ({"top_p": 0.5}, [0.0, 0.6, 0.0, 0.4]),  # 0.3 alone is less than 0.5, and 0.2 completes it
        ({"top_p": 0.25}, [0.0, 1.0, 0.0, 0.0]),
        ({"top_p": 1e-6}, [0.0, 1.0, 0.0, 0.0]),
        (
            {"top_k": 3, "top_p": 0.9},
            [0.0, 3 / 6.5, 1.5 / 6.5, 2 / 6.5],
        ),  # 0.65 is left; 0.5 of it is less than 0.9 of it
        (
            {"temperature": 0.5},
            [0.01 / 0.1625, 0.09 / 0.1625, 0.0225 / 0.1625, 0.04 / 0.1625],
        ),  # squares
    ],
)
def test_restricted_sampling_follows_the_remaining_distribution(
    settings: dict[str, float], expected: list[float]
) -> None:
    probabilities = [0.1, 0.3, 0.15, 0.2, *([0.025] * 10)]
    if "temperature" in settings:
        probabilities = probabilities[:4]
    observed = frequencies(probabilities, **settings)
    np.testing.assert_allclose(observed[:4], expected, atol=0.015)
    assert observed[4:].sum() == 0


def test_top_k_keeps_lower_token_ids_among_equal_probabilities() -> None:
    assert (frequencies([0.25] * 4, top_k=2) > 0).tolist() == [True, True, False, False]


def test_logprobs_are_computed_before_the_top_k_restriction() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    tokens, logprobs = sample_tokens(
        logits, np.array([0.99]), sampling=rows(1, temperature=2.0, top_k=2)
    )
    weights = np.exp(np.array([1.0, 0.5, 0.0, -0.5]))
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(np.log(weights[1] / weights.sum()), abs=1e-6)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.6, 0.9, 1.0])
def test_logprobs_are_computed_before_the_top_p_restriction(top_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(50, 1)
    numbers = (np.arange(50) + 0.5) / 50
    tokens, logprobs = sample_tokens(logits, numbers, sampling=rows(50, top_p=top_p))
    weights = np.exp(np.array([2.0, 1.0, 0.0, -1.0]))
    np.testing.assert_allclose(logprobs, np.log(weights / weights.sum())[tokens], atol=1e-6)


def test_token_without_probability_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for number in (0.0, 1 - 2.0**-52):
        tokens, _ = sample_tokens(logits, np.array([number]), sampling=rows(1))
        assert tokens.tolist() == [1]


def test_row_with_non_finite_logits_gets_nan_without_affecting_other_rows() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [torch.inf, 0.0]])
    tokens, logprobs = sample_tokens(logits, np.full(3, 0.5), sampling=rows(3))
    assert np.isfinite(logprobs).tolist() == [True, False, False]
    assert ((tokens >= 0) & (tokens < 2)).all()


def test_sampling_in_chunks_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(33, 273, generator=torch.Generator().manual_seed(1))
    numbers = uniforms(np.arange(33, dtype=np.uint64), np.arange(33))
    whole = sample_tokens(logits, numbers, sampling=rows(33, top_p=0.9))
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 1000)
    parts = sample_tokens(logits, numbers, sampling=rows(33, top_p=0.9))
    assert whole[0].tolist() == parts[0].tolist()
    np.testing.assert_allclose(whole[1], parts[1], rtol=0, atol=1e-5)
