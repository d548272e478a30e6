"""Computes the advantages of recorded samples again, by the settings that the run's log describes.

A prompt group's samples are held while its records are read: they are neighbours on one partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relax_events import __version__
from relax_events.algorithms.advantage_estimator import (
    AdvantageEstimator,
    RewardedSample,
    list_advantage_settings,
)
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError, ObjectError, RewardError
from relax_events.events.parts import StoredArray
from relax_events.events.tensors import dense
from relax_events.events.types import RunDescribed, SampleReady
from relax_events.history.run_log import RunLog
from relax_events.objects import ObjectStore
from relax_events.objects.claim_check import check_out, count_array_bytes
from relax_events.plugins import ALGORITHMS, list_installed
from relax_events.projections.ledger_facts import ReadyPosition, Verdict
from relax_events.runtime.run_description import read_described_config
from relax_events.runtime.validation import READY_ARRAYS
from relax_events.topics.names import COMMANDS

MAX_HELD_BYTES = 256 * 1024**2
RTOL, ATOL = 1e-5, 1e-6
"""Of the largest advantage of the prompt group: another order of a sum changes the last bits."""


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """The settings by which a run's advantages may have been computed.

    Attributes:
        algorithms: Each with the longest completion, those to be tried first at the beginning.
        otherwise: What is known of advantages that none of them gives.
    """

    algorithms: Sequence[tuple[AlgorithmConfig, int]]
    otherwise: Verdict


def list_recorded_settings(run_log: RunLog) -> RecordedSettings:
    """Return the settings of the reader's run file and of all descriptions of the run, which may
    have been resumed with others.
    """
    config, releases, all_are_read = run_log.config, set[str](), True
    algorithms = [(config.algorithm, config.engine.sampling.max_new_tokens)]
    for record in run_log.read_control(COMMANDS, RunDescribed):
        releases.add(record.event.package_version)
        try:
            described = read_described_config(
                record.event, run_id=config.run.id, reader_config=config
            )
            algorithms.append((described.algorithm, described.engine.sampling.max_new_tokens))
        except ConfigError:
            all_are_read = False
    return choose_settings(
        algorithms, is_this_release=(__version__ in releases or not releases) and all_are_read
    )


def choose_settings(
    candidates: Sequence[tuple[AlgorithmConfig, int]], *, is_this_release: bool
) -> RecordedSettings:
    """Return the distinct settings among these, the last ones first.

    Args:
        candidates: Those of the reader's run file, then the described ones, each with the longest
            completion.
        is_this_release: Whether this release may have computed the advantages.
    """
    algorithms: dict[str, tuple[AlgorithmConfig, int]] = {}
    is_run = True
    for algorithm, max_new_tokens in reversed(candidates):
        if algorithm.is_unread:
            is_run = False
            continue
        # the file of an algorithm of one's own may have changed since
        is_run = is_run and algorithm.name in list_installed(ALGORITHMS)
        name = repr((list_advantage_settings(algorithm), max_new_tokens))
        algorithms.setdefault(name, (algorithm, max_new_tokens))
    otherwise = Verdict.DIFFERS if is_this_release else Verdict.OTHER_RELEASE
    return RecordedSettings(list(algorithms.values()), otherwise if is_run else Verdict.NOT_RUN)


Generation = tuple[int, str]
Candidate = tuple[ReadyPosition, SampleReady]


@dataclass(slots=True)
class _OpenGeneration:
    """The records of one generation, until each of its samples has one."""

    num_samples: int
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    num_bytes: int = 0


class RecordedAdvantages:
    """Compares the advantages of ready samples with those that their rewards give.

    Each generation of a prompt group for itself. A role that died may have written a part of it
    before the whole: all records of a sample are compared.
    """

    def __init__(self, settings: RecordedSettings, store: ObjectStore | None) -> None:
        self._otherwise, self._store = settings.otherwise, store
        self._estimators = [
            (algorithm, AdvantageEstimator(algorithm, max_new_tokens=max_new_tokens))
            for algorithm, max_new_tokens in settings.algorithms
        ]
        self._unread = _list_unread(algorithm for algorithm, _ in settings.algorithms)
        self._open: dict[str, dict[Generation, _OpenGeneration]] = {}
        self._num_bytes = 0

    @property
    def num_held(self) -> int:
        """Number of prompt groups whose samples are in memory."""
        return len(self._open)

    def add(
        self, sample: SampleReady, at: ReadyPosition
    ) -> Iterable[tuple[ReadyPosition, Verdict]]:
        """Take a sample; return the verdicts on its generation's records once all are there."""
        key = sample.key
        if not 0 <= key.sample_index < key.samples_per_prompt:
            return ()
        generations = self._open.setdefault(key.prompt_group_id, {})
        name = key.policy_version, key.generation_digest
        generation = generations.setdefault(name, _OpenGeneration(key.samples_per_prompt))
        generation.candidates.setdefault(key.sample_index, []).append((at, sample))
        num_bytes = count_array_bytes(sample)
        generation.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if len(generation.candidates) < generation.num_samples:
            self._bound()
            return ()
        verdicts = self._compare(generation)
        if verdicts and all(verdict is Verdict.AGREES for _, verdict in verdicts):
            self._num_bytes -= generations.pop(name).num_bytes
            if not generations:
                del self._open[key.prompt_group_id]
        else:  # one of the records may be forged, and its sample's own come later
            self._bound()
        return verdicts

    def forget(self, prompt_group_id: str) -> None:
        """Drop what is held of a prompt group: no more of its records come."""
        for generation in self._open.pop(prompt_group_id, {}).values():
            self._num_bytes -= generation.num_bytes

    def _bound(self) -> None:
        """Drop the oldest prompt groups where too much is held, as under forged records."""
        while self._num_bytes > MAX_HELD_BYTES and len(self._open) > 1:
            self.forget(next(iter(self._open)))

    def _compare(self, generation: _OpenGeneration) -> list[tuple[ReadyPosition, Verdict]]:
        """Compare all records with what the first or the last records of the samples give, by the
        settings that fit most of them; an empty list where arrays can't be fetched.
        """
        try:
            candidates = [
                [(at, self._fetch(sample)) for at, sample in generation.candidates[index]]
                for index in sorted(generation.candidates)
            ]
        except ObjectError:
            return []
        best, num_best = [(at, self._otherwise) for each in candidates for at, _ in each], 0
        has_several = any(len(each) > 1 for each in candidates)
        for pick in (0, -1) if has_several else (0,):
            for place, (algorithm, estimator) in enumerate(self._estimators):
                members = [each[pick][1] for each in candidates]
                expected = _estimate(estimator, algorithm, members)
                verdicts = _compare_with(expected, candidates, otherwise=self._otherwise)
                num_agree = sum(verdict is Verdict.AGREES for _, verdict in verdicts)
                if num_agree > num_best:
                    best, num_best = verdicts, num_agree
                if num_agree == len(verdicts):
                    # the next prompt groups will be of the same settings
                    self._estimators.insert(0, self._estimators.pop(place))
                    return best
        return best

    def _fetch(self, sample: SampleReady) -> SampleReady:
        """Return a sample with the arrays that advantages are computed from; raises ObjectError."""
        # a reward by turn needs to know which tokens the paths share
        unread = self._unread - ({"tokens"} if sample.path_lengths else set())
        if self._store is not None:
            return check_out(sample, self._store, leave=unread)
        for name in ("tokens", *READY_ARRAYS):
            if name not in unread and isinstance(getattr(sample, name), StoredArray):
                raise ObjectError(f"sample {sample.sample_id}: {name} is in no store of this run")
        return sample


def _list_unread(algorithms: Iterable[AlgorithmConfig]) -> set[str]:
    """Return the arrays of ready samples that none of these algorithms computes advantages from."""
    unread = {"tokens", "topk_ids", "topk_teacher_logprobs", "routed_experts", *READY_ARRAYS}
    unread -= {"loss_mask", "advantages"}
    for algorithm in algorithms:
        if algorithm.has_reward_kl or algorithm.has_distill_advantage:
            unread -= {"rollout_logprobs", "actor_logprobs"}
        if algorithm.has_reward_kl:
            unread -= {"ref_logprobs"}
        if algorithm.needs_critic:
            unread -= {"values"}
        if algorithm.has_distill_advantage:
            unread -= {"teacher_logprobs"}
    return unread


def _estimate(
    estimator: AdvantageEstimator, algorithm: AlgorithmConfig, samples: Sequence[SampleReady]
) -> list[NDArray[np.float32]]:
    """Estimate the advantages of a prompt group; nothing where its samples don't allow it."""
    try:
        return estimator([RewardedSample.from_ready(sample, algorithm) for sample in samples])
    except (ConfigError, RewardError):
        return []


def _compare_with(
    expected: Sequence[NDArray[np.float32]],
    candidates: Sequence[Sequence[Candidate]],
    *,
    otherwise: Verdict,
) -> list[tuple[ReadyPosition, Verdict]]:
    """Compare the advantages of all records of the samples with one estimate."""
    largest = max((float(np.abs(values).max(initial=0)) for values in expected), default=0.0)
    return [
        (at, Verdict.AGREES if _are_close(sample, values, largest) else otherwise)
        for samples, values in zip(candidates, expected, strict=bool(expected))
        for at, sample in samples
    ]


def _are_close(sample: SampleReady, expected: NDArray[np.float32], largest: float) -> bool:
    advantages = dense(sample.advantages, what=f"sample {sample.sample_id}: advantages")
    return advantages.shape == expected.shape and bool(
        np.array_equal(advantages, expected)
        or np.allclose(advantages, expected, rtol=RTOL, atol=ATOL * largest)
    )
