"""A step of preference pairs does not depend on how it is split between pairs,
packed, or ordered.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, run_config

SAMPLES = make_samples(10, seed=11)
PAIRS = [SAMPLES[start:stop] for start, stop in pairwise(range(0, 11, 2))]


LOSSES = {
    "dpo": {"name": "dpo", "dpo_beta": 0.5},
    "smoothed": {"name": "dpo", "label_smoothing": 0.1, "dpo_beta": 0.5},
    "by token, with likelihood": {
        "name": "dpo",
        "dpo_beta": 2.0,
        "length_normalised": True,
        "nll_coefficient": 0.3,
    },
    "ipo": {"name": "ipo"},
    "ipo of sums": {"name": "ipo", "length_normalised": False},
}


def step_of(pairs, *, max_tokens, loss, share_rows=True):
    """Train pairs as the trainer feeds them; return the metrics and the gradients."""
    config = run_config(
        algorithm=LOSSES[loss],
        trainer={"max_grad_norm": 1e9},
        data={"chosen_key": "chosen", "rejected_key": "rejected"},
    )
    backend = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
    backend._model.shares_rows = share_rows
    gradients = []
    backend._parameters.update = lambda **_: gradients.append(backend._parameters.gradients.clone())
    batcher = MicroBatcher(max_tokens=max_tokens, whole_prompt_groups=True)
    for pair in pairs:
        for micro_batch in batcher.feed(pair):
            backend.accumulate(micro_batch)
    if last := batcher.flush():
        backend.accumulate(last)
    return backend.step().to_metrics(), gradients[0]


@cache
def whole_step(loss: str):
    """Run the step in one micro-batch, each sample in a row of its own, padded."""
    return step_of(PAIRS, max_tokens=10_000, loss=loss, share_rows=False)


@settings(max_examples=40)
@given(
    order=st.permutations(PAIRS),
    max_tokens=st.integers(1, 200),
    loss=st.sampled_from(list(LOSSES)),
    share_rows=st.booleans(),
)
def test_pair_metrics_and_gradients_do_not_depend_on_order_and_packing(
    order, max_tokens, loss, share_rows
):
    metrics, gradients = whole_step(loss)
    other_metrics, other_gradients = step_of(
        order, max_tokens=max_tokens, loss=loss, share_rows=share_rows
    )
    # Not 1e-12: RMSNorm works in float32 in any model.
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-5, atol=1e-7)
