"""A run whose reference is refreshed: what each sample was compared with is on the log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import FinishedRun, report_of, run_on_policy, sample_events

from relax_events.events.types import SampleEvaluated, SampleReady
from relax_events.objects import ObjectStore
from relax_events.topics import TopicPlan
from relax_events.weights.artifact_writer import stored_versions

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
EVERY, NUM_STEPS = 3, 10
ALGORITHM = f"""
[algorithm]
kl_coefficient = 0.01
reference_every = {EVERY}
"""


@pytest.fixture(scope="module")
def run(
    prepared: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Return a finished run, strictly on-policy."""
    folder = tmp_path_factory.mktemp("refreshed")
    return run_on_policy(
        prepared,
        folder,
        bootstrap_servers,
        ALGORITHM,
        learning_rate=1e-2,
        num_steps=NUM_STEPS,
        timeout_seconds=280,
    )


def test_reference_of_a_sample_is_the_newest_refreshed_version(run: FinishedRun) -> None:
    report = report_of(run.run_file.parent, run.config.run.id)
    assert (report["succeeded"], report["ledger_problems"]) == (True, [])
    scored = [
        event
        for event in sample_events(run, "reference.logprobs")
        if isinstance(event, SampleEvaluated)
    ]
    assert len(scored) == NUM_STEPS * 16
    assert {(event.policy_version, event.model_version) for event in scored} == {
        (version, version // EVERY * EVERY) for version in range(NUM_STEPS)
    }


def test_policy_equals_its_reference_at_each_refresh_and_only_there(run: FinishedRun) -> None:
    distances: dict[int, float] = {}
    for event in sample_events(run, "advantage.samples"):
        assert isinstance(event, SampleReady)
        mask = np.asarray(event.loss_mask, bool)
        apart = np.abs(np.asarray(event.rollout_logprobs) - np.asarray(event.ref_logprobs))[mask]
        version = event.policy_version
        distances[version] = max(distances.get(version, 0.0), float(apart.max()))
        assert [(one.policy_version, one.num_tokens) for one in event.version_segments] == [
            (version, int(mask.sum()))
        ]
    assert len(distances) == NUM_STEPS
    for version, distance in distances.items():
        assert (distance < 1e-4) == (version % EVERY == 0), (version, distance)


def test_store_keeps_the_references_that_may_be_asked_for(run: FinishedRun) -> None:
    slots = TopicPlan.from_config(run.config).num_slots
    kept = set(stored_versions(ObjectStore.open(run.config.objects_uri)))
    newest = set(range(NUM_STEPS - 2 * slots + 1, NUM_STEPS + 1))
    assert kept == newest | {0} | {
        version // EVERY * EVERY for version in range(NUM_STEPS - slots, NUM_STEPS + 1)
    }
