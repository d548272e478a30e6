"""One model on the device for several roles of a process that score with different weights of it.

    reference      turn ──▶ its weights into the model ──▶ score ...           ──▶ turn ──▶ ...
    actor-forward                                          waits ──▶ turn ──▶ its weights ──▶ score

A role keeps the model while it has work, for as long as ten exchanges of the weights have taken, so
exchanges cost at most a tenth of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import structlog
from numpy.typing import NDArray

from relax_events.events.types import SampleRolledOut
from relax_events.training.backend.protocol import IdsOf, SampleScores, Scorer
from relax_events.weights.manifest import Weights

log = structlog.get_logger()
EXCHANGES_PER_TURN = 10
"""How many exchanges of the weights a turn lasts at least, if there is work for so long."""


@runtime_checkable
class CopyingScorer(Protocol):
    """A scorer that gives a copy of the weights that it was opened with."""

    def copy_weights(self) -> Weights:
        """Return the loaded weights in memory of the host."""
        ...


class SharedScorer:
    """A scorer, and whose weights it holds. Thread-safe."""

    def __init__(self, scorer: Scorer, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Share a scorer that holds its initial weights."""
        self._scorer, self._clock = scorer, clock
        self._changed = threading.Condition()
        self._is_busy = False
        self._user: ScorerShare | None = None
        self._loaded: Weights | None = None
        self._initial: Weights | None = None
        self._began = self._used = self._exchange_seconds = 0.0

    def score(self, share: ScorerShare, call: Callable[[Scorer], Any]) -> Any:
        """Call the scorer with the weights of a share in it."""
        with self._turn(share):
            self._load(share.weights)
            return call(self._scorer)

    def replace(self, share: ScorerShare, weights: Weights) -> None:
        """Load other weights for a share.

        Raises:
            WeightsError: They don't fit the model; the share keeps its old ones.
        """
        with self._turn(share):
            self._load(weights)

    @contextmanager
    def _turn(self, share: ScorerShare) -> Iterator[None]:
        with self._changed:
            while self._is_busy or (seconds := self._seconds_until(share)) > 0:
                self._changed.wait(None if self._is_busy else seconds)
            self._is_busy = True
            if self._user is not share:
                self._user, self._began = share, self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._is_busy, self._used = False, self._clock()
                self._changed.notify_all()

    def _seconds_until(self, share: ScorerShare) -> float:
        """Return for how long the model is another share's: until its turn is over, or it has had
        no work for an exchange's time.
        """
        if self._user is None or self._user is share:
            return 0.0
        now = self._clock()
        turn_left = self._began + EXCHANGES_PER_TURN * self._exchange_seconds - now
        return min(turn_left, self._used + self._exchange_seconds - now)

    def _load(self, weights: Weights | None) -> None:
        """Let the model hold weights; None are the initial ones."""
        if weights is self._loaded:
            return
        if self._initial is None:
            assert isinstance(self._scorer, CopyingScorer), "only such a scorer is shared"
            self._initial = self._scorer.copy_weights()
        started = self._clock()
        self._scorer.load_weights(self._initial if weights is None else weights)
        self._loaded, self._exchange_seconds = weights, self._clock() - started
        log.debug("weights.exchanged", seconds=round(self._exchange_seconds, 3))


class ScorerShare:
    """One role's view of a shared scorer. Implements `Scorer`; used by one thread."""

    def __init__(self, shared: SharedScorer) -> None:
        """Score with the initial weights until others are loaded."""
        self._shared = shared
        self.weights: Weights | None = None

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """See `Scorer`."""
        scores: list[NDArray[np.float32]] = self._shared.score(
            self, lambda scorer: scorer.score(samples)
        )
        return scores

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, ids_of: IdsOf
    ) -> list[SampleScores]:
        """See `Scorer`."""
        scores: list[SampleScores] = self._shared.score(
            self, lambda scorer: scorer.score_topk(samples, num_ids=num_ids, ids_of=ids_of)
        )
        return scores

    def load_weights(self, weights: Weights) -> None:
        """See `Scorer`. Weights that the trainer sent are copied: their memory is received into
        again.
        """
        if weights.transport != "store":
            copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            weights = replace(weights, tensors=copies)
        self._shared.replace(self, weights)
        self.weights = weights
