"""The reference role: log-probabilities of every sample under the initial model, for the KL term.

Consumes rollout.samples, produces LogprobsComputed on reference.logprobs.
"""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.roles.logprob_processor import LogprobScorer, open_scorer
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.processors import SampleLoop


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker("reference", config, index=index) as worker:
        scorer = open_scorer(worker, model=config.model.without_adapters.routing_freely)
        evaluate = LogprobScorer(
            worker,
            scorer,
            model_role="reference",
            topic="reference.logprobs",
            use_version=lambda _: 0,
        )
        SampleLoop(worker, evaluate, max_tokens=config.trainer.max_tokens_per_micro_batch).run()
