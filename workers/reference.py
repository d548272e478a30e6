"""The reference role: computes every sample's log-probabilities under the reference model.

Consumes rollout.samples, produces SampleEvaluated on reference.logprobs. The reference is the
run's first version. With `algorithm.reference_every` it is, for each sample, the newest version
divisible by it that is not newer than the sample: so it depends on the sample alone, however many
reference workers there are and whenever they work.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

from relax_events.config import RunConfig
from relax_events.errors import RunFailed, WeightsError
from relax_events.roles.logprob_processor import LogprobScorer, UseVersion, open_scorer
from relax_events.roles.scorer_turns import ScorerTurns
from relax_events.roles.versioned_weights import VersionedWeights
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.control_follower import RECENT_VERSIONS
from relax_events.runtime.processors import SampleLoop
from relax_events.staleness import reference_version
from relax_events.topics import TopicPlan
from relax_events.topics.names import REFERENCE_LOGPROBS
from relax_events.weights.transport import StoreReader


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    every, store = config.algorithm.reference_every, open_store(config)
    num_versions = every + TopicPlan.from_config(config).num_slots
    with ExitStack() as stack:
        worker = stack.enter_context(
            open_worker(
                "reference",
                config,
                index=index,
                store=store,
                num_versions=max(num_versions, RECENT_VERSIONS),
            )
        )
        model = config.model if every else config.model.without_adapters
        turns = ScorerTurns.of_worker(worker)
        if worker.drain.requested:
            return
        scorer = open_scorer(worker, model=model.routing_freely, turns=turns)
        reader = stack.enter_context(closing(StoreReader(store)))
        versions = VersionedWeights(worker, scorer, reader, num_kept=num_versions)
        evaluate = LogprobScorer(
            worker,
            scorer,
            model_role="reference",
            topic=REFERENCE_LOGPROBS,
            use_version=_refreshed(versions, config) if every else _first,
        )
        SampleLoop(
            worker,
            evaluate,
            max_tokens=config.trainer.max_tokens_per_micro_batch,
            listeners=(versions.apply,) if every else (),
            may_work=turns.bind_role("reference"),
        ).run()


def _first(_: int) -> int:
    """Keep the model that the scorer was loaded with."""
    return 0


def _refreshed(versions: VersionedWeights, config: RunConfig) -> UseVersion:
    """Return a function that loads the reference of a sample's version."""

    def use(policy_version: int) -> int:
        loaded_version = reference_version(
            policy_version,
            every=config.algorithm.reference_every,
            first_version=config.first_version,
        )
        try:
            return versions.use(loaded_version)
        except WeightsError as error:
            raise RunFailed(
                f"the reference of version {policy_version} is version {loaded_version}, whose "
                f"weights can't be read: {error}"
            ) from error

    return use
