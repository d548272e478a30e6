"""What reference, actor-forward and critic have in common: numbers for given tokens under given weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from relax_events.broker.records import OutRecord
from relax_events.config import RunConfig
from relax_events.events.types import SampleEvaluated, SampleRolledOut
from relax_events.pipeline.worker import Worker
from relax_events.plugins import TRAINER_BACKENDS, find_plugin
from relax_events.training.protocol import Scorer, TokenScorer, TrainerBackend

UseVersion = Callable[[int], int]


class Evaluating:
    """Turns record batches of samples into what the scorer gives for them, version by version.

    `use_version` is told the samples' version, makes the scorer hold the weights that belong to it, and returns the
    version of those weights.
    """

    def __init__(self, worker: Worker, scorer: TokenScorer, *, evaluator: str, topic: str, use_version: UseVersion) -> None:
        self._worker, self._scorer, self._use_version = worker, scorer, use_version
        self._evaluator, self._topic = evaluator, topic

    def __call__(self, samples: Sequence[SampleRolledOut]) -> list[OutRecord]:
        """Evaluate the samples."""
        by_version: dict[int, list[SampleRolledOut]] = defaultdict(list)
        for sample in samples:
            by_version[sample.policy_version].append(sample)
        records = []
        for version, members in sorted(by_version.items()):
            evaluator_version = self._use_version(version)
            for sample, values in zip(members, self._scorer.score(members), strict=True):
                evaluated = SampleEvaluated(
                    sample_id=sample.sample_id,
                    prompt_group_id=sample.prompt_group_id,
                    policy_version=sample.policy_version,
                    evaluator=self._evaluator,
                    evaluator_version=evaluator_version,
                    values=values,
                )
                records.append(
                    self._worker.sample_record(self._topic, evaluated, prompt_group_id=sample.prompt_group_id, policy_version=sample.policy_version)
                )
            self._worker.metrics.tokens(sum(len(sample.tokens) for sample in members))
        return records


def open_scorer(worker: Worker) -> Scorer:
    """Load the initial model for scoring, with the code of the run's trainer backend; raises as `backend_of`, or if that can't be done."""
    return backend_of(worker.config).open_scorer(worker.config)


def backend_of(config: RunConfig) -> type[TrainerBackend]:
    """Return the run's trainer backend.

    Raises:
        ConfigError: None of that name is installed.
    """
    name = config.trainer.backend
    backend: type[TrainerBackend] = find_plugin(TRAINER_BACKENDS, name, what=f"trainer.backend = {name!r}").load()
    return backend
