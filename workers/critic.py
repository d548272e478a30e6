"""The critic role: predicts the return from every token of a sample, by a value model that is
trained on the run's own steps.

    rollout.samples     ──▶ train on all steps up to the sample's policy version, then predict
                            ──▶ SampleEvaluated on critic.values
    control.train-steps ──▶ train on the step, between record batches

So the critic is never older than the policy version that generated the sample; in sync mode both
have the same version. The event names the critic's version. An input offset is committed once the
values are acknowledged; training the critic commits nothing, see
`relax_events.training.critic_learning`.

Several processes may hold the critic together (`critic.ranks`). Rank 0 does all of the above, the
others compute with it; see `relax_events.training.critic_ranks`.
"""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.config.topology import Topology
from relax_events.errors import ConfigError
from relax_events.objects import ObjectStore
from relax_events.roles.logprob_processor import LogprobScorer
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.worker import Worker
from relax_events.topics.names import CRITIC_VALUES
from relax_events.training.backend.factory import find_backend
from relax_events.training.backend.protocol import Critic
from relax_events.training.critic_learning import (
    CriticLearner,
    open_critic_checkpoints,
    read_bounds,
)
from relax_events.training.critic_ranks import follow_leader
from relax_events.training.distributed import open_ranks, wait_visibly
from relax_events.training.ranks import Ranks


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop. This process may be one of several ranks, as the
    trainer's.
    """
    store = open_store(config)
    timeout = config.trainer.collective_timeout_seconds
    with open_ranks(
        timeout_seconds=timeout, lay_out=lambda num_ranks: lay_out_critic(config, num_ranks)
    ) as ranks:
        port = config.telemetry.worker_port(ranks.local_rank)
        telemetry = config.telemetry.model_copy(update={"metrics_port": port})
        config = config.model_copy(update={"telemetry": telemetry})
        with open_worker("critic", config, index=index or ranks.rank, store=store) as worker:
            wait_visibly(ranks, worker.lifecycle, timeout_seconds=timeout)
            critic = find_backend(config.trainer).open_critic(config, ranks)
            if ranks.rank == 0:
                _lead(worker, critic, store, ranks)
                return
            critic.on_progress(worker.lifecycle.record_progress)
            with open_critic_checkpoints(config, store, ranks) as checkpoints:
                follow_leader(
                    critic,
                    checkpoints,
                    ranks=ranks,
                    bounds=read_bounds(store, ranks),
                    lifecycle=worker.lifecycle,
                )


def lay_out_critic(config: RunConfig, num_ranks: int) -> Topology:
    """Return how the ranks that a launcher started are laid out.

    Raises:
        ConfigError: The run file names another number, by which the run was planned.
    """
    if num_ranks != config.critic_ranks:
        raise ConfigError(
            f"the critic needs {config.critic_ranks} ranks (critic.ranks, or trainer.ranks where "
            f"they hold parts of the model), and {num_ranks} started; start as many, or set "
            f"critic.ranks = {num_ranks}"
        )
    return config.trainer.topology(num_ranks)


def _lead(worker: Worker, critic: Critic, store: ObjectStore, ranks: Ranks) -> None:
    with CriticLearner(worker, critic, store, ranks=ranks) as learning:
        evaluate = LogprobScorer(
            worker,
            learning.critic,
            model_role="critic",
            topic=CRITIC_VALUES,
            use_version=learning.learn_up_to,
        )
        SampleLoop(
            worker,
            evaluate,
            max_tokens=worker.config.trainer.max_tokens_per_micro_batch,
            after_part=learning.step_if_ready,
        ).run()
