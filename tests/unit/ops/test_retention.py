"""A long run purges its topics itself: once for each checkpoint, and never without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
from event_samples import committed, ended, published

from relax_events.config import RunConfig
from relax_events.config.unset_keys import with_values
from relax_events.controller.retention import RetentionManager
from relax_events.errors import BrokerUnavailable
from relax_events.events.parts import CheckpointRef, Outcome, TopicOffset
from relax_events.ops.purge import DeleteRange
from relax_events.ops.run_purger import RetentionState
from relax_events.session import defaults
from relax_events.session.defaults import resolve_defaults
from relax_events.topics import TopicPlan

CUT = DeleteRange(("relax.r.rollout.samples", 0), 0, 5, "versions")


class FakePurger:
    """Counts purges; the broker is away when the test sets it."""

    def __init__(self) -> None:
        self.num_purges, self.is_away = 0, False
        self.oldest_with_records = 10**9

    def plan(self, state: RetentionState) -> list[DeleteRange]:
        if self.is_away:
            raise BrokerUnavailable("no broker answers")
        return [CUT]

    def purge(self, cuts: list[DeleteRange], state: RetentionState) -> Counter[str]:
        self.num_purges += 1
        return Counter({"rollout.samples": sum(cut.num_records for cut in cuts)})


@pytest.fixture
def purger() -> FakePurger:
    return FakePurger()


@pytest.fixture
def make_keeper(
    make_run_config: Callable[..., RunConfig], purger: FakePurger
) -> Callable[..., RetentionManager]:
    def make(**run: Any) -> RetentionManager:
        return RetentionManager(purger, make_run_config(run=run))  # type: ignore[arg-type]

    return make


def checkpointed(step: int, version: int) -> Any:
    return committed(step, checkpoint=CheckpointRef(version, f"file:///c/{version}", bytes(32)))


def test_records_are_purged_once_for_each_checkpoint(
    make_keeper: Callable[..., RetentionManager], purger: FakePurger
) -> None:
    keeper = make_keeper(retain_versions=3)
    for event in (published(0), committed(0), published(1)):
        keeper.apply(event)
    assert (keeper.purge_if_due(), purger.num_purges) == (
        Counter(),
        0,
    )  # nothing may go before there is a checkpoint
    keeper.apply(checkpointed(1, 1))
    keeper.apply(checkpointed(2, 1))
    assert keeper.purge_if_due() == {"rollout.samples": 5}
    assert keeper.purge_if_due() == {}
    keeper.apply(checkpointed(3, 3))
    keeper.purge_if_due()
    assert purger.num_purges == 2


def test_nothing_is_purged_from_a_source_run_or_when_all_is_retained(
    make_keeper: Callable[..., RetentionManager], purger: FakePurger
) -> None:
    keeper = make_keeper(retain_versions=0)
    keeper.apply(checkpointed(1, 1))
    keeper.purge_if_due()
    assert purger.num_purges == 0


def test_unavailable_broker_fails_one_purge_only(
    make_keeper: Callable[..., RetentionManager], purger: FakePurger
) -> None:
    keeper = make_keeper(retain_versions=3)
    purger.is_away = True
    keeper.apply(checkpointed(1, 1))
    with structlog.testing.capture_logs() as logs:
        assert keeper.purge_if_due() == {}
    assert [entry["event"] for entry in logs] == ["purge.failed"]
    purger.is_away = False
    keeper.apply(checkpointed(3, 3))
    assert keeper.purge_if_due() == {"rollout.samples": 5}


def test_retention_state_tracks_slots_and_positions_and_drops_unneeded_ones() -> None:
    state = RetentionState()
    for event in (
        ended("000002-0001-1", Outcome.TRAINED, version=4),
        ended("000003-0000-0", Outcome.EXPIRED),
        *map(published, range(6)),
    ):
        state.apply(event)
    for step, (partition, offset) in enumerate([(0, 4), (1, 9), (0, 6), (0, 5), (1, 9)]):
        state.apply(
            committed(step, consumed=[TopicOffset("relax.r.advantage.samples", partition, offset)])
        )
    assert {(slot.train_step, slot.group_index): step for slot, step in state.trained.items()} == {
        (2, 1): 4
    }
    assert state.ended == {"000002-0001-1", "000003-0000-0"}
    state.forget_before(4)
    assert (
        sorted(state.published),
        state.newest_version,
        [step.train_step for step in state.steps],
    ) == ([4, 5], 5, [4])
    assert state.positions == {("advantage.samples", 0): 6, ("advantage.samples", 1): 9}


@pytest.mark.parametrize("are_steps_first", [False, True])
def test_steps_before_the_log_count_whichever_topic_is_read_first(are_steps_first: bool) -> None:
    state = RetentionState()
    versions = [replace(published(version), num_steps_before=version) for version in (7, 8)]
    steps = [committed(step) for step in (7, 8)]
    for event in [*steps, *versions] if are_steps_first else [*versions, *steps]:
        state.apply(event)
    assert (state.num_steps_before, len(state.steps)) == (7, 2)


def test_retain_versions_not_above_max_staleness_is_rejected(
    make_run_config: Callable[..., RunConfig],
) -> None:
    with pytest.raises(
        ValueError, match=r"retain_versions must be 0 or above max_staleness = 2, got 2"
    ):
        make_run_config(run={"retain_versions": 2, "max_staleness": 2})


def test_only_a_new_run_on_this_machine_s_disk_is_bounded_by_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """8,000 samples of 512 tokens x 48 bytes are 0.197 GB a step: half of 100 GB holds 254 steps,
    less the 50 that a checkpoint may be old. Records that a run was begun to keep are not deleted.
    """
    sizes = {"prompts_per_step": 1000, "samples_per_prompt": 8, "num_steps": 100_000}
    config = RunConfig.model_validate(
        {
            "run": {"id": "long", "directory": str(tmp_path / "none" / "yet")} | sizes,
            "model": {"path": str(tmp_path / "model"), "tiny": {}},
            "data": {"source": "jsonl:rows"},
        }
    )
    monkeypatch.setattr(
        defaults.shutil, "disk_usage", {tmp_path: SimpleNamespace(free=10**11)}.__getitem__
    )

    def retained(**more: Any) -> int:
        return resolve_defaults(config, **more)[0].run.retain_versions

    assert retained(has_broker=True) == 254 - 50
    assert retained(has_broker=False) == 0
    earlier = with_values(config, {"run.retain_versions": 0})
    assert retained(has_broker=True, earlier_config=earlier) == 0
    assert TopicPlan.from_config(config).segment_seconds == 0, "commands read the run file alone"
