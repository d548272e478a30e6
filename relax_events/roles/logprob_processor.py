"""Computes log-probabilities or values of given tokens under given weights.

Shared by the roles reference, actor-forward, critic and teacher.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import structlog

from relax_events.config import ModelConfig
from relax_events.errors import OutOfMemory, WeightsError
from relax_events.events.parts import FinishReason, Outcome
from relax_events.events.types import SampleEvaluated, SampleRolledOut
from relax_events.kafka.records import ProducerRecord
from relax_events.roles.scorer_turns import ScorerTurns
from relax_events.roles.shared_scorer import CopyingScorer, ScorerShare, SharedScorer
from relax_events.runtime.hosting import current_host
from relax_events.runtime.worker import Worker
from relax_events.training.backend.factory import find_backend
from relax_events.training.backend.protocol import SampleScores, Scorer, TokenScorer

log = structlog.get_logger()
UseVersion = Callable[[int], int]


class LogprobScorer:
    """Scores record batches of samples, version by version.

    `use_version` receives the samples' version, loads the weights for it into the scorer, and
    returns the version of those weights.
    """

    def __init__(
        self,
        worker: Worker,
        scorer: TokenScorer,
        *,
        model_role: str,
        topic: str,
        use_version: UseVersion,
    ) -> None:
        self._worker, self._scorer, self._use_version = worker, scorer, use_version
        self._model_role, self._topic = model_role, topic

    def __call__(self, samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
        """Score the samples; return the output records."""
        by_version: dict[int, list[SampleRolledOut]] = defaultdict(list)
        for sample in samples:
            by_version[sample.policy_version].append(sample)
        records: list[ProducerRecord] = []
        for version, members in sorted(by_version.items()):
            try:
                model_version = self._use_version(version)
            except WeightsError as error:
                records += self._ended(members, error)
                continue
            members, scores, ends = self._compute_what_fits(members)
            records += ends
            evaluated = [
                SampleEvaluated(
                    key=sample.key,
                    model_role=self._model_role,
                    model_version=model_version,
                    values=values.logprobs,
                    topk_ids=values.ids,
                    topk_logprobs=values.id_logprobs,
                )
                for sample, values in zip(members, scores, strict=True)
            ]
            records += self._worker.records.build_for_samples(self._topic, evaluated)
            self._worker.metrics.count_tokens(sum(len(sample.tokens) for sample in members))
        return records

    def _ended(
        self, samples: Sequence[SampleRolledOut], error: WeightsError
    ) -> list[ProducerRecord]:
        """Ask the trainer to end the prompt groups of a version whose weights are lost: they are
        issued again on another version.
        """
        version, groups = (
            samples[0].policy_version,
            list(dict.fromkeys(sample.prompt_group_id for sample in samples)),
        )
        log.error(
            "weights.lost", policy_version=version, num_prompt_groups=len(groups), error=str(error)
        )
        self._worker.metrics.weights.count_lost_groups(len(groups))
        reason = f"{self._worker.role}: the weights of version {version} can't be used"
        return [
            self._worker.records.build_end_request(
                group, Outcome.EXPIRED, reason, policy_version=version
            )
            for group in groups
        ]

    def _compute_what_fits(
        self, samples: list[SampleRolledOut]
    ) -> tuple[list[SampleRolledOut], list[SampleScores], list[ProducerRecord]]:
        """Return samples with their scores, and requests to end the prompt groups of those with a
        path that does not fit the device alone.
        """
        ends: list[ProducerRecord] = []
        while True:
            try:
                with self._worker.lifecycle.piece("score a part of a record batch"):
                    return samples, self._compute_scores(samples), ends
            except OutOfMemory as error:  # its frames hold tensors
                problem, sample_id = str(error), error.sample_id
            (group,) = {one.prompt_group_id for one in samples if one.sample_id == sample_id}
            log.error("prompt_group.too_large", prompt_group_id=group, error=problem)
            reason = f"{problem}; in the role {self._worker.role}"
            ends.append(
                self._worker.records.build_end_request(
                    group, Outcome.FAILED, reason, policy_version=samples[0].policy_version
                )
            )
            samples = [one for one in samples if one.prompt_group_id != group]

    def _compute_scores(self, samples: Sequence[SampleRolledOut]) -> list[SampleScores]:
        """Return the scores of each sample; zeros, without a forward pass, for lost samples, which
        have no loss token.
        """
        kept = [one for one in samples if one.finish_reason is not FinishReason.LOST]
        scores = iter(self.compute_scores(kept) if kept else ())
        algorithm = self._worker.config.algorithm
        has_sets = self._model_role == "teacher" and algorithm.has_topk_loss
        num_ids = algorithm.num_compared_tokens if has_sets else 0
        return [
            _build_empty_scores(sample, num_ids=num_ids)
            if sample.finish_reason is FinishReason.LOST
            else next(scores)
            for sample in samples
        ]

    def compute_scores(self, samples: Sequence[SampleRolledOut]) -> list[SampleScores]:
        """Return the scores of each sample.

        Raises:
            OutOfMemory: A path does not fit the device alone; the error names its sample.
        """
        return [SampleScores(logprobs) for logprobs in self._scorer.score(samples)]


def _build_empty_scores(sample: SampleRolledOut, *, num_ids: int) -> SampleScores:
    zeros = np.zeros(len(sample.tokens), np.float32)
    if not num_ids:
        return SampleScores(zeros)
    return SampleScores(zeros, np.empty((0, num_ids), np.int32), np.empty((0, num_ids), np.float32))


def open_scorer(
    worker: Worker,
    *,
    model: ModelConfig | None = None,
    threads: int | None = None,
    turns: ScorerTurns | None = None,
) -> Scorer:
    """Load a model for scoring, with the code of the run's trainer backend. Roles of one process
    that load the same model share it.

    Args:
        worker: Gives the run's configuration.
        model: The model folder; by default the run's initial model.
        threads: Number of threads; by default the trainer's.
        turns: Those on the scorer's device; by default it stays there.
    Raises:
        ConfigError: As `find_backend`, or the model can't be loaded.
    """
    config = worker.config
    trainer = (
        config.trainer
        if threads is None
        else config.trainer.model_copy(update={"threads": threads})
    )
    settings = config.model_copy(update={"model": model or config.model, "trainer": trainer})

    def load() -> Scorer:
        scorer = find_backend(trainer).open_scorer(settings)
        if turns is not None:
            turns.add(scorer)
        return scorer

    if (host := current_host()) is None or settings.model.lora is not None:
        return load()

    def load_to_share() -> SharedScorer | None:
        scorer = load()
        return SharedScorer(scorer) if isinstance(scorer, CopyingScorer) else None

    shared = host.share((settings.model.model_dump_json(), trainer.threads), load_to_share)
    return load() if shared is None else ScorerShare(shared)
