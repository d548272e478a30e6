"""The teacher role: log-probabilities of every sample under a teacher model, for distillation.

Consumes rollout.samples, produces SampleEvaluated on teacher.logprobs: of the sampled tokens and,
if the loss needs them, of the top tokens of the teacher or the policy. The logits are divided by
the sampling temperature, as in the other roles, so teacher and policy are compared under the
distribution that the tokens were sampled from.

With several teachers a sample's source chooses its own. Each worker holds all teachers that no
server has, and sends the other samples to the servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from relax_events.config import RunConfig, TeacherModelConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.json_text import parse_json
from relax_events.events.types import SampleRolledOut
from relax_events.models.token_table import require_same_vocabulary
from relax_events.roles.logprob_processor import LogprobScorer, open_scorer
from relax_events.roles.served_teacher import ServedTeacher
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.worker import Worker
from relax_events.topics.names import TEACHER_LOGPROBS
from relax_events.training.backend.protocol import IdsOf, SampleScores, TopTokenScorer

IDS_OF: Mapping[str, IdsOf] = {"teacher_topk": "model", "student_topk": "sample", "union": "both"}
"""Whose token ids the teacher scores, by `algorithm.distill_tokens`."""
MAX_REQUEST_TOKENS = 262_144
"""Of a record batch that is sent to servers (`teacher.urls`)."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker("teacher", config, index=index) as worker:
        teachers = open_teachers(worker)
        is_served = all(one.urls for one in config.list_teachers().values())
        SampleLoop(
            worker,
            TeacherScorer(worker, teachers),
            max_tokens=MAX_REQUEST_TOKENS
            if is_served
            else config.trainer.max_tokens_per_micro_batch,
        ).run()


def open_teachers(worker: Worker) -> dict[str, TopTokenScorer]:
    """Load the teachers for scoring, or connect to their servers; by the section of each.

    Raises:
        ConfigError: The run has no teacher, a model can't be loaded, or its vocabulary is not the
            policy's.
        EnvironmentProblem: The HTTP client is not installed.
    """
    teachers = worker.config.list_teachers()
    if not teachers:
        raise ConfigError(
            "the teacher role has no teacher; set teacher.model_path to the folder of its "
            "checkpoint"
        )
    return {name: _open_teacher(worker, name, one) for name, one in teachers.items()}


def _open_teacher(worker: Worker, section: str, teacher: TeacherModelConfig) -> TopTokenScorer:
    config, path = worker.config, teacher.model_path
    assert path is not None, "checked by the configuration"
    require_same_vocabulary(config.model.path, path, section=section)
    if teacher.urls:
        return ServedTeacher(teacher, section=section)
    model = teacher.as_model(path).model_copy(update={"media": config.model.media})
    return open_scorer(worker, model=model, threads=config.teacher.threads)


class TeacherScorer(LogprobScorer):
    """Computes the teachers' log-probabilities for record batches of samples."""

    def __init__(self, worker: Worker, teachers: Mapping[str, TopTokenScorer]) -> None:
        super().__init__(
            worker,
            next(iter(teachers.values())),
            model_role="teacher",
            topic=TEACHER_LOGPROBS,
            use_version=lambda _: 0,
        )
        self._teachers, self._algorithm = teachers, worker.config.algorithm
        self._route_key = worker.config.reward.route_key
        self._section_of = {
            source: f"teachers.{name}"
            for name, one in worker.config.teachers.items()
            for source in one.sources
        }

    def compute_scores(self, samples: Sequence[SampleRolledOut]) -> list[SampleScores]:
        """Return the log-probabilities of the sampled tokens, and of the top tokens if the loss
        needs them.

        Raises:
            PoisonSample: No teacher is for the source of a sample.
        """
        indices: dict[str, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            indices[self._choose(sample)].append(index)
        scores: dict[int, SampleScores] = {}
        for section, chosen in indices.items():
            chosen_samples = [samples[index] for index in chosen]
            scores |= zip(
                chosen, self._score_samples(self._teachers[section], chosen_samples), strict=True
            )
        return [scores[index] for index in range(len(samples))]

    def _score_samples(
        self, teacher: TopTokenScorer, samples: Sequence[SampleRolledOut]
    ) -> list[SampleScores]:
        if not self._algorithm.has_topk_loss:
            return [SampleScores(logprobs) for logprobs in teacher.score(samples)]
        return teacher.score_topk(
            samples,
            num_ids=self._algorithm.distill_top_k,
            ids_of=IDS_OF[self._algorithm.distill_tokens],
        )

    def _choose(self, sample: SampleRolledOut) -> str:
        """Return the section of the sample's teacher."""
        if not self._section_of:
            return "teacher"
        source = _metadata(sample).get(self._route_key)
        section = self._section_of.get(source, "teacher") if isinstance(source, str) else "teacher"
        if section not in self._teachers:
            raise PoisonSample(
                f"sample {sample.sample_id}: no teacher is for the source {source!r} "
                f"({self._route_key} in its metadata); name it in the sources of a table "
                "of teachers, or set teacher.model_path for all others"
            )
        return section


def _metadata(sample: SampleRolledOut) -> dict[str, Any]:
    try:
        metadata = parse_json(sample.metadata)
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}
