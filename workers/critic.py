"""The critic role: what is to be expected at every token of a sample, by a value model that learns
from the run's own steps.

    rollout.samples ──▶ first learn from every step that led to the sample's version, then evaluate
    ──▶ LogprobsComputed on critic.values control.train-steps ──▶ learn from the step, between
    record batches

So the values of a sample are those of a critic that has learned at least as long as the policy that
drew it; in sync mode exactly as long. The version that the critic had come to stands in the event.
An input offset is committed when the values are acknowledged; learning commits nothing, see
`relax_events.training.critic_learning`.
"""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.roles.logprob_processor import LogprobScorer
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.processors import SampleLoop
from relax_events.training.backend.factory import find_backend
from relax_events.training.critic_learning import CriticLearner


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    with open_worker("critic", config, index=index, store=store) as worker:
        critic = find_backend(config).open_critic(config)
        with CriticLearner(worker, critic, store) as learning:
            evaluate = LogprobScorer(
                worker,
                critic,
                model_role="critic",
                topic="critic.values",
                use_version=learning.learn_up_to,
            )
            SampleLoop(
                worker,
                evaluate,
                max_tokens=config.trainer.max_tokens_per_micro_batch,
                after_part=learning.step_if_ready,
            ).run()
