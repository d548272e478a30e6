"""Two roles that share one model: each scores with its own weights, and exchanges take a tenth of
the time at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_events.errors import WeightsError
from relax_events.roles.shared_scorer import ScorerShare, SharedScorer
from relax_events.training.backend.protocol import SampleScores
from relax_events.weights.manifest import Weights

pytestmark = pytest.mark.unit


def weights_of(version: int, *, transport: str = "store") -> Weights:
    """Return weights that are their version's number."""
    return Weights(version, {"value": torch.tensor([float(version)])}, b"", transport=transport)


class OneNumber:
    """A scorer whose scores are its weights; each exchange of them takes two seconds."""

    def __init__(self) -> None:
        self.weights, self.now, self.num_loads = weights_of(0), 0.0, 0

    def clock(self) -> float:
        return self.now

    def copy_weights(self) -> Weights:
        return Weights(0, {"value": self.weights.tensors["value"].clone()}, b"")

    def load_weights(self, weights: Weights) -> None:
        if weights.policy_version > 90:
            raise WeightsError("other weights")
        self.weights, self.num_loads = weights, self.num_loads + 1
        self.now += 2.0

    def score(self, samples: Sequence[Any]) -> list[NDArray[np.float32]]:
        self.now += 1.0
        return [self.weights.tensors["value"].numpy() for _ in samples]

    def score_topk(self, samples: Sequence[Any], **_: Any) -> list[SampleScores]:
        return [SampleScores(values) for values in self.score(samples)]


def score(share: ScorerShare) -> float:
    """Return the number that a share scores with."""
    sample: Any = object()
    (value,) = share.score([sample])
    (again,) = share.score_topk([sample], num_ids=1, ids_of="model")
    assert again.logprobs == value
    return float(value[0])


def test_each_share_scores_with_its_own_weights() -> None:
    scorer = OneNumber()
    shared = SharedScorer(scorer, clock=scorer.clock)
    reference, actor = ScorerShare(shared), ScorerShare(shared)
    assert (score(reference), score(actor), scorer.num_loads) == (0.0, 0.0, 0)
    actor.load_weights(weights_of(3))
    scorer.now += 100.0
    assert (score(actor), scorer.num_loads) == (3.0, 1)
    scorer.now += 100.0
    assert (score(reference), scorer.num_loads) == (0.0, 2)
    scorer.now += 100.0
    with pytest.raises(WeightsError):
        actor.load_weights(weights_of(99))
    assert score(actor) == 3.0
    sent = weights_of(5, transport="gloo")
    actor.load_weights(sent)
    sent.tensors["value"].fill_(7.0)  # the next version arrives in the same memory
    scorer.now += 100.0
    assert score(reference) == 0.0
    scorer.now += 100.0
    assert score(actor) == 5.0


def test_a_share_keeps_the_model_while_it_has_work_for_ten_exchanges() -> None:
    scorer = OneNumber()
    shared = SharedScorer(scorer, clock=scorer.clock)
    reference, actor = ScorerShare(shared), ScorerShare(shared)
    score(reference)
    assert shared._seconds_until(actor) <= 0, "nothing was exchanged yet"
    actor.load_weights(weights_of(1))
    assert shared._seconds_until(actor) == 0.0
    assert shared._seconds_until(reference) == 2.0, "the actor was at work just now"
    scorer.now += 1.5
    assert shared._seconds_until(reference) == 0.5
    score(actor)
    assert shared._seconds_until(reference) == 2.0
    scorer.now += 2.0
    assert shared._seconds_until(reference) <= 0.0, "the actor has no work"
    score(actor)
    for _ in range(10):
        score(actor)
    assert shared._seconds_until(reference) <= 0.0, "its turn has been long enough"
