"""The actor-forward role: recomputes every sample's log-probabilities with the trainer's model.

Consumes rollout.samples, produces SampleEvaluated on actor.logprobs. The weights are of the
sample's policy version. The loss divides by these log-probabilities instead of the engine's, whose
numerics may differ from the trainer's.
"""

from __future__ import annotations

from contextlib import closing

from relax_events.config import RunConfig
from relax_events.roles.logprob_processor import LogprobScorer, open_scorer
from relax_events.roles.scorer_turns import ScorerTurns
from relax_events.roles.versioned_weights import VersionedWeights
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.processors import SampleLoop
from relax_events.topics.names import ACTOR_LOGPROBS
from relax_events.weights.factory import open_weights_reader


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    with (
        open_worker("actor-forward", config, index=index, store=store) as worker,
        closing(open_weights_reader(worker, store)) as reader,
    ):
        turns = ScorerTurns.of_worker(worker)
        if worker.drain.requested:
            return
        scorer = open_scorer(worker, turns=turns)
        versions = VersionedWeights(worker, scorer, reader)
        evaluate = LogprobScorer(
            worker, scorer, model_role="actor", topic=ACTOR_LOGPROBS, use_version=versions.use
        )
        SampleLoop(
            worker,
            evaluate,
            max_tokens=config.trainer.max_tokens_per_micro_batch,
            listeners=(versions.apply, reader.subscribe(lambda: None)),
            may_work=turns.bind_role("actor-forward"),
        ).run()
