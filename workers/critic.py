"""The critic role: predicts the return from every token of a sample, by a value model that is
trained on the run's own steps.

    rollout.samples     ──▶ train on all steps up to the sample's policy version, then predict
                            ──▶ LogprobsComputed on critic.values
    control.train-steps ──▶ train on the step, between record batches

So the critic is never older than the policy version that generated the sample; in sync mode both
have the same version. The event names the critic's version. An input offset is committed once the
values are acknowledged; training the critic commits nothing, see
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
        critic = find_backend(config.trainer).open_critic(config)
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
