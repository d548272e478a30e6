"""The actor-forward role: log-probabilities of every sample under the policy version that owns its slot, as the trainer sees it.

Consumes rollout.samples, produces SampleEvaluated on actor.logprobs. Where engine and trainer differ in numerics, these
stand below the probability ratio instead of the engine's.
"""

from __future__ import annotations

from collections import OrderedDict

from relax_events.config import RunConfig
from relax_events.errors import PoisonSample
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.pipeline.map_role import MapRole
from relax_events.pipeline.worker import Worker
from relax_events.training.protocol import Scorer
from relax_events.weights.manifest import Weights
from relax_events.weights.transport import StoreTransport, WeightsTransport
from workers.evaluation import Evaluating, open_scorer
from workers.opening import open_store, open_worker


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    with open_worker("actor-forward", config, index=index, store=store) as worker:
        scorer = open_scorer(worker)
        versions = VersionedWeights(worker, scorer, StoreTransport(store, full_every=config.weights.full_every))
        evaluate = Evaluating(worker, scorer, evaluator="actor", topic="actor.logprobs", use_version=versions.use)
        MapRole(worker, evaluate, max_tokens=config.trainer.max_tokens_per_micro_batch, listeners=(versions.note,)).run()


class VersionedWeights:
    """Keeps the weights of the window's versions at hand and puts the wanted ones into the scorer."""

    def __init__(self, worker: Worker, scorer: Scorer, transport: WeightsTransport) -> None:
        self._worker, self._scorer, self._transport = worker, scorer, transport
        self._published: dict[int, PolicyVersionPublished] = {}
        self._cached: OrderedDict[int, Weights] = OrderedDict()
        self._held = -1

    def note(self, event: Event) -> None:
        """Remember where a version's tensors are; forget those that left the window."""
        if isinstance(event, PolicyVersionPublished):
            self._published[event.policy_version] = event
            self._published.pop(event.policy_version - self._worker.plan.num_slots, None)

    def use(self, policy_version: int) -> int:
        """Make the scorer hold the weights of a version.

        Raises:
            PoisonSample: The version was never published, or long ago.
            WeightsError: Its artifact is unreadable.
        """
        if policy_version == self._held:
            return policy_version
        if policy_version not in self._cached:
            self._cached[policy_version] = self._read(policy_version)
            while len(self._cached) > self._worker.plan.num_slots:
                self._cached.popitem(last=False)
        self._scorer.load_weights(self._cached[policy_version])
        self._held = policy_version
        self._worker.beats.policy_version = policy_version
        return policy_version

    def _read(self, policy_version: int) -> Weights:
        latest = self._worker.control.latest  # known an instant before we are told
        published = latest if latest and latest.policy_version == policy_version else self._published.get(policy_version)
        if published is None:
            raise PoisonSample(f"policy version {policy_version} is not among the published ones in the window, {sorted(self._published)}")
        return self._transport.fetch(published)
