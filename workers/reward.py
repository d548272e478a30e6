"""The reward role: scores every generated sample.

Consumes rollout.samples, produces SampleScored on reward.scores; samples that the judge role scores
are skipped. A reward function of whole prompt groups is called once all their samples have arrived.
Samples that were lost or late are scored by no function. If a function raises, hangs, crashes or
returns a number that is not finite, the samples of that call fail with the reason, and the failure
is counted. The worker continues, and no failure becomes a reward of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.kafka.records import ProducerRecord
from relax_events.rewards.pool import RewardPool
from relax_events.rewards.scoring import read_source, score_samples
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.processors import SampleLoop, SingleSamples, WholePromptGroups
from relax_events.runtime.worker import Worker
from relax_events.topics.names import REWARD_SCORES

log = structlog.get_logger()
PART_SAMPLES = 16
"""Samples per child process in one part of slow rewards: enough to keep the processes busy, few
enough to commit scores soon."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    reward = config.computed_reward
    if reward is None:
        raise ConfigError(
            "the reward role has nothing to score: the judge scores all samples; start the "
            "judge role, or remove judge.model_path"
        )
    with RewardPool(reward) as pool, open_worker("reward", config, index=index) as worker:
        SampleLoop(
            worker,
            RewardScorer(worker, pool),
            gatherer=WholePromptGroups(worker) if pool.takes_prompt_group else SingleSamples(),
            min_part_samples=PART_SAMPLES * reward.num_processes,
        ).run()


class RewardScorer:
    """Turns record batches of samples into scores."""

    def __init__(self, worker: Worker, pool: RewardPool) -> None:
        self._worker, self._pool = worker, pool

    def __call__(self, samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
        """Score the samples, except those of the judge role, in order."""
        ours = [sample for sample in samples if self._is_ours(sample)]
        return self._worker.records.build_for_samples(REWARD_SCORES, self._scores(ours))

    def _is_ours(self, sample: SampleRolledOut) -> bool:
        config = self._worker.config
        return (
            not config.judged_sources
            or read_source(sample, config.reward) not in config.judged_sources
        )

    def _scores(self, samples: Sequence[SampleRolledOut]) -> list[SampleScored]:
        with self._worker.lifecycle.activity(
            "score samples", deadline_seconds=self._pool.max_response_seconds
        ):
            scores = score_samples(
                samples,
                self._pool,
                self._worker.config.reward,
                on_answer=self._worker.heartbeat.advance,
            )
        for sample, scored in zip(samples, scores, strict=True):
            self._count(sample, scored)
        return scores

    def _count(self, sample: SampleRolledOut, scored: SampleScored) -> None:
        outcome = "scored" if scored.error is None else "failed"
        self._worker.metrics.count_scored(outcome if sample.finish_reason.is_scored else "skipped")
        if scored.error is not None:
            log.warning("sample.unscored", sample_id=sample.sample_id, error=scored.error)
