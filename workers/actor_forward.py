"""The actor-forward role: recomputes every sample's log-probabilities with the trainer's model.

Consumes rollout.samples, produces LogprobsComputed on actor.logprobs. The weights are those of the
sample's policy version. The loss divides by these log-probabilities instead of the engine's, whose
numerics may differ from the trainer's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing

import structlog

from relax_events.config import RunConfig
from relax_events.errors import PoisonSample, WeightsError
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.roles.logprob_processor import LogprobScorer, open_scorer
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import Scorer
from relax_events.weights.factory import open_weights_reader
from relax_events.weights.manifest import Weights
from relax_events.weights.transport import WeightsReader

log = structlog.get_logger()
MAX_VERSIONS = 2
"""Versions whose weights are held in memory: two, because samples of neighbouring versions may
alternate."""
LOST_SECONDS = 30.0
"""Seconds until an unreadable version is read again: its objects may have been restored."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    with (
        open_worker("actor-forward", config, index=index, store=store) as worker,
        closing(open_weights_reader(worker, store)) as reader,
    ):
        scorer = open_scorer(worker)
        versions = VersionedWeights(worker, scorer, reader)
        evaluate = LogprobScorer(
            worker, scorer, model_role="actor", topic="actor.logprobs", use_version=versions.use
        )
        SampleLoop(
            worker,
            evaluate,
            max_tokens=config.trainer.max_tokens_per_micro_batch,
            listeners=(versions.apply, reader.subscribe(lambda: None)),
        ).run()


class VersionedWeights:
    """Loads the weights of the wanted version into the scorer.

    Samples arrive by version, oldest first, so only a few versions are cached.
    """

    def __init__(
        self,
        worker: Worker,
        scorer: Scorer,
        transport: WeightsReader,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker, self._scorer, self._transport = worker, scorer, transport
        self._published: dict[int, PolicyVersionPublished] = {}
        self._cached: OrderedDict[int, Weights] = OrderedDict()
        self._clock = clock
        self._lost: dict[int, tuple[float, WeightsError]] = {}
        """Monotonic time and reason of the last failed read, by version."""
        self._held = -1

    def apply(self, event: Event) -> None:
        """Keep a published version, and drop the versions that left the window."""
        if isinstance(event, PolicyVersionPublished):
            self._published[event.policy_version] = event
            self._published.pop(event.policy_version - self._worker.plan.num_slots, None)
            self._lost.pop(event.policy_version - self._worker.plan.num_slots, None)

    def use(self, policy_version: int) -> int:
        """Load the weights of a version into the scorer; return the version.

        Raises:
            PoisonSample: The version was never published, or has left the window.
            WeightsError: Its artifact is unreadable, or was unreadable less than LOST_SECONDS ago.
        """
        if policy_version == self._held:
            return policy_version
        since, known = self._lost.get(policy_version, (0.0, None))
        if known is not None and self._clock() - since < LOST_SECONDS:
            raise known
        with self._worker.lifecycle.transfer("load weights"):
            if policy_version not in self._cached:
                self._make_room()
                self._cached[policy_version] = self._read(policy_version)
            self._cached.move_to_end(policy_version)
            self._scorer.load_weights(self._cached[policy_version])
        self._held = policy_version
        self._worker.heartbeat.set_policy_version(policy_version)
        return policy_version

    def _make_room(self) -> None:
        """Drop versions before the next one is read: all but the newest ones, and those that the
        trainer sent, whose memory may be received into again.
        """
        for version, weights in list(self._cached.items()):
            if weights.transport != "store":
                del self._cached[version]
        while len(self._cached) >= MAX_VERSIONS:
            self._cached.popitem(last=False)

    def _read(self, policy_version: int) -> Weights:
        latest = self._worker.control.latest  # known an instant before the event arrives here
        published = (
            latest
            if latest and latest.policy_version == policy_version
            else self._published.get(policy_version)
        )
        if published is None:
            raise PoisonSample(
                f"policy version {policy_version} is not among the published ones in the "
                f"window, {sorted(self._published)}"
            )
        try:
            weights = self._transport.fetch(published)
        except WeightsError as error:
            remedy = (
                "restore the object, or start the run again: its trainer writes its newest "
                "version again; or fork it from an older version"
            )
            lost = WeightsError(f"{error}; {remedy}")
            self._lost[policy_version] = self._clock(), lost
            raise lost from error
        log.info("weights.loaded", policy_version=policy_version, transport=weights.transport)
        return weights
