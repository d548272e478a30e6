"""A version whose weights are lost fails its own prompt groups, which are issued again, and a sample
that does not fit the device fails its own; other samples are evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_samples import published, rolled_out
from numpy.typing import NDArray

from relax_events.config import AlgorithmConfig
from relax_events.errors import OutOfMemory, WeightsError
from relax_events.events.parts import Outcome
from relax_events.events.types import PolicyVersionPublished, SampleEvaluated, SampleRolledOut
from relax_events.roles.logprob_processor import LogprobScorer
from relax_events.roles.versioned_weights import VersionedWeights
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.weights.manifest import Weights


class RecordingWorker:
    """Records what a role writes."""

    def __init__(self) -> None:
        self.role, self.metrics = "actor-forward", WorkerMetrics("actor-forward")
        self.plan = SimpleNamespace(num_slots=3)
        self.config = SimpleNamespace(algorithm=AlgorithmConfig())
        self.control = SimpleNamespace(latest=None)
        self.lifecycle = self.records = self
        self.heartbeat = SimpleNamespace(set_policy_version=lambda _: None)

    def piece(self, _: str) -> Any:
        return nullcontext()

    transfer = piece

    def build_for_samples(self, _: str, events: Sequence[SampleEvaluated]) -> list[tuple[str, int]]:
        return [(event.sample_id, event.model_version) for event in events]

    def build_end_request(
        self, prompt_group_id: str, outcome: Outcome, reason: str, *, policy_version: int
    ) -> tuple[str, Outcome, str, int]:
        return prompt_group_id, outcome, reason, policy_version


class Scorer:
    """Returns zeros."""

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        return [np.zeros(4, np.float32) for _ in samples]

    def load_weights(self, _: Weights) -> None:
        pass


class Transport:
    """Has lost a version."""

    def __init__(self, lost: int) -> None:
        self.lost, self.asked = lost, list[int]()

    def fetch(self, event: PolicyVersionPublished) -> Weights:
        self.asked.append(event.policy_version)
        if event.policy_version == self.lost:
            raise WeightsError(
                "weights file:///objects/weights/00000002/manifest.json can't be used: there "
                "is no such object"
            )
        return Weights(event.policy_version, {}, bytes(32))


def test_lost_version_fails_only_its_own_prompt_groups() -> None:
    worker: Any = RecordingWorker()
    transport: Any = Transport(lost=2)
    now = [100.0]
    versions = VersionedWeights(worker, Scorer(), transport, clock=lambda: now[0])  # type: ignore[arg-type]
    for version in (1, 2, 3):
        versions.apply(published(version))
    evaluate = LogprobScorer(
        worker, Scorer(), model_role="actor", topic="actor.logprobs", use_version=versions.use
    )
    samples = [
        rolled_out(f"{version:06d}-0000-0", index, version=version)
        for version in (3, 2, 1)
        for index in range(2)
    ]
    reason = "actor-forward: the weights of version 2 can't be used"
    assert evaluate(samples) == [
        ("000001-0000-0/0", 1),
        ("000001-0000-0/1", 1),
        ("000002-0000-0", Outcome.EXPIRED, reason, 2),
        ("000003-0000-0/0", 3),
        ("000003-0000-0/1", 3),
    ]
    assert evaluate([rolled_out("000002-0001-0", version=2)]) == [
        ("000002-0001-0", Outcome.EXPIRED, reason, 2)
    ]
    assert transport.asked == [1, 2, 3], "what is lost is not read again and again"
    assert (
        b'relax_prompt_groups_without_weights_total{role="actor-forward"} 2.0'
        in worker.metrics.render()
    )
    with pytest.raises(
        WeightsError, match=r"no such object; restore the object, or start the run again"
    ):
        versions.use(2)
    transport.lost, now[0] = -1, now[0] + 1.0
    assert versions.use(2) == 2, "its objects were restored"


def test_a_path_that_does_not_fit_ends_its_prompt_group_by_name() -> None:
    worker: Any = RecordingWorker()

    class SmallScorer(Scorer):
        def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
            for sample in samples:
                if sample.prompt_group_id in ("000002-0001-0", "000002-0003-0"):
                    raise OutOfMemory(
                        "out of memory: a path of 20000 tokens",
                        sample_id=sample.sample_id,
                        num_paths=1,
                        num_cells=20_000,
                    )
            return super().score(samples)

    evaluate = LogprobScorer(
        worker,
        SmallScorer(),
        model_role="actor",
        topic="actor.logprobs",
        use_version=lambda one: one,
    )
    samples = [
        rolled_out(f"000002-{number:04d}-0", index, version=2)
        for number in range(4)
        for index in range(2)
    ]
    reason = "out of memory: a path of 20000 tokens; in the role actor-forward"
    assert evaluate(samples) == [
        ("000002-0001-0", Outcome.FAILED, reason, 2),
        ("000002-0003-0", Outcome.FAILED, reason, 2),
        *[(f"000002-000{number}-0/{index}", 2) for number in (0, 2) for index in range(2)],
    ]
    assert evaluate(samples[2:4]) == [("000002-0001-0", Outcome.FAILED, reason, 2)]


@pytest.mark.parametrize(
    ("read_seconds", "wait_seconds"), [(0.01, 1.0), (0.5, 5.0), (2.0, 20.0), (60.0, 30.0)]
)
def test_lost_version_is_read_again_after_a_time_that_depends_on_the_read(
    read_seconds: float, wait_seconds: float
) -> None:
    """Small weights are back soon, and large ones are not read all the time."""
    worker: Any = RecordingWorker()
    now = [100.0]

    class SlowTransport(Transport):
        def fetch(self, event: PolicyVersionPublished) -> Weights:
            now[0] += read_seconds
            return super().fetch(event)

    transport: Any = SlowTransport(lost=2)
    versions = VersionedWeights(worker, Scorer(), transport, clock=lambda: now[0])  # type: ignore[arg-type]
    versions.apply(published(2))
    for _ in range(2):
        with pytest.raises(WeightsError):
            versions.use(2)
    transport.lost, read_at = -1, now[0]
    now[0] = read_at + wait_seconds - 0.001
    with pytest.raises(WeightsError):
        versions.use(2)
    assert transport.asked == [2]
    now[0] = read_at + wait_seconds + 0.001
    assert versions.use(2) == 2
