"""The first train step proves that engine and trainer have the same weights, or ends the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import ConfigError
from relax_events.events.types import SampleReady
from relax_events.training.backend.protocol import StepMetrics, WorstToken
from relax_events.training.backend.step_sums import require_agreement
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, plain_logprobs, plain_model, run_config

SAMPLES = [
    changed(
        sample,
        rollout_logprobs=np.where(sample.loss_mask, plain_logprobs(sample.tokens), 0).astype("f4"),
    )
    for sample in make_samples(6, seed=4)
]
"""As an engine with the trainer's weights returns them."""
BOUND = run_config().trainer.max_start_mismatch


def train(samples: list[SampleReady]) -> StepMetrics:
    """Return the metrics of a first step, of a micro-batch for each sample."""
    backend = TorchBackend(run_config(), ranks=SingleRank(), dtype=torch.float64)
    for sample in samples:
        backend.accumulate([sample])
    return backend.step()


@pytest.fixture(scope="module")
def agreeing() -> StepMetrics:
    """Return the metrics of a step whose engine has the trainer's weights."""
    return train(SAMPLES)


def test_the_same_weights_agree(agreeing: StepMetrics) -> None:
    assert agreeing.mismatch_kl < 1e-6
    require_agreement(agreeing, bound=1e-6, policy_version=0, ranks=SingleRank())


@pytest.mark.parametrize("is_in_one_micro_batch", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_token_that_differs_most_is_named(is_in_one_micro_batch: bool, is_last: bool) -> None:
    odd = max(SAMPLES, key=lambda sample: sample.loss_mask.sum())
    positions = np.flatnonzero(odd.loss_mask)
    number = len(positions) - 1 if is_last else 0
    shift = np.zeros(len(odd.tokens), np.float32)
    shift[positions[number]] = 3
    shifted = changed(odd, rollout_logprobs=odd.rollout_logprobs - shift)
    samples = [shifted if one is odd else one for one in SAMPLES]
    backend = TorchBackend(run_config(), ranks=SingleRank(), dtype=torch.float64)
    for micro_batch in [samples] if is_in_one_micro_batch else [[one] for one in samples]:
        backend.accumulate(micro_batch)
    place = rf"largest: 3 at sampled token {number} of sample {odd.sample_id}[,)]"
    with pytest.raises(ConfigError, match=rf"for policy version 0: mismatch_kl .*{place}"):
        require_agreement(backend.step(), bound=BOUND, policy_version=0, ranks=SingleRank())


def test_the_worst_tokens_of_all_ranks_are_named_on_each(agreeing: StepMetrics) -> None:
    class Ranks(SingleRank):
        def all_gather_bytes(self, data: bytes) -> list[bytes]:
            return [data, data, b'[[0.5,"of another rank",7]]']

    here = replace(agreeing, mismatch_kl=1.0, worst_tokens=(WorstToken(0.25, "here", 2),))
    places = "0.5 at sampled token 7 of sample of another rank, 0.25 at sampled token 2 of sample h"
    with pytest.raises(ConfigError, match=rf"largest: {places}ere\)"):
        require_agreement(here, bound=BOUND, policy_version=0, ranks=Ranks())


def test_a_head_that_each_process_draws_for_itself_ends_the_run() -> None:
    """As of an untied model without `lm_head.weight`."""
    model = plain_model(run_config().model.path)
    other = type(model)(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    torch.nn.init.normal_(other.get_output_embeddings().weight, std=0.5)
    samples = [
        changed(
            sample,
            rollout_logprobs=np.where(
                sample.loss_mask, plain_logprobs(sample.tokens, 1.0, other), 0
            ).astype("f4"),
        )
        for sample in SAMPLES
    ]
    with pytest.raises(ConfigError, match=r"weights or prompts are not the same: .*relax doctor"):
        require_agreement(train(samples), bound=BOUND, policy_version=0, ranks=SingleRank())


@given(kl=st.floats(0, 5), bound=st.floats(0, 2), mean_abs=st.floats(0, 3))
def test_the_bound_decides_alone(
    agreeing: StepMetrics, kl: float, bound: float, mean_abs: float
) -> None:
    metrics = replace(agreeing, mismatch_kl=kl, mismatch_mean_abs=mean_abs)
    if not bound or kl <= bound:
        require_agreement(metrics, bound=bound, policy_version=0, ranks=SingleRank())
        return
    remedy = "relax doctor" if mean_abs > 0.1 else "trainer.max_start_mismatch above it"
    with pytest.raises(ConfigError, match=remedy):
        require_agreement(metrics, bound=bound, policy_version=0, ranks=SingleRank())


def test_tokens_are_no_metrics_of_the_log(agreeing: StepMetrics) -> None:
    metrics = agreeing.to_metrics()
    assert "worst_tokens" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())
