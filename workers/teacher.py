"""The teacher role: log-probabilities of every sample under a teacher model, for distillation.

Consumes rollout.samples, produces LogprobsComputed on teacher.logprobs: of the sampled tokens and,
if the loss needs them, of the top tokens of the teacher or the policy. The logits are divided by
the sampling temperature, as in the other roles, so teacher and policy are compared under the
distribution that the tokens were sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.types import SampleRolledOut
from relax_events.models.token_table import require_same_vocabulary
from relax_events.roles.logprob_processor import LogprobScorer, open_scorer
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import SampleScores, Scorer


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker("teacher", config, index=index) as worker:
        SampleLoop(
            worker,
            TeacherScorer(worker, open_teacher(worker)),
            max_tokens=config.trainer.max_tokens_per_micro_batch,
        ).run()


def open_teacher(worker: Worker) -> Scorer:
    """Load the teacher for scoring.

    Raises:
        ConfigError: The run has no teacher, its model can't be loaded, or its vocabulary is not the
            policy's.
    """
    config, path = worker.config, worker.config.teacher.model_path
    if path is None:
        raise ConfigError(
            "the teacher role has no teacher; set teacher.model_path to the folder of its "
            "checkpoint"
        )
    require_same_vocabulary(config.model.path, path)
    model = config.teacher.as_model(path).model_copy(update={"media": config.model.media})
    return open_scorer(worker, model=model, threads=config.teacher.threads)


class TeacherScorer(LogprobScorer):
    """Computes the teacher's log-probabilities for record batches of samples."""

    def __init__(self, worker: Worker, scorer: Scorer) -> None:
        super().__init__(
            worker, scorer, model_role="teacher", topic="teacher.logprobs", use_version=lambda _: 0
        )
        self._teacher, self._algorithm = scorer, worker.config.algorithm

    def compute_scores(self, samples: Sequence[SampleRolledOut]) -> list[SampleScores]:
        """Return the log-probabilities of the sampled tokens, and of the top tokens if the loss
        needs them.
        """
        if not self._algorithm.has_topk_loss:
            return super().compute_scores(samples)
        choose_own = self._algorithm.distill_tokens == "teacher_topk"
        return self._teacher.score_topk(
            samples, num_ids=self._algorithm.distill_top_k, choose_own=choose_own
        )
