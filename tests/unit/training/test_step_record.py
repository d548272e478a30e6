"""The ranks' results merged into the step's record, and the outcomes that follow from it."""

from __future__ import annotations

import numpy as np
import pytest
from event_samples import committed, ended, published, ready
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import RunFailed
from relax_events.events.parts import CheckpointRef, FinishReason, Outcome, TopicOffset
from relax_events.projections.training_history import TrainingHistory
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.commit import build_trained_outcomes
from relax_events.training.step_record import PhaseTimer, RankStepResult, StepRecord


def share_of(
    rank: int, *micro_batches: list[tuple[str, int, float]], trainer_version: int = 3
) -> RankStepResult:
    """Make a rank's share: micro-batches of (prompt group, version, reward), one sample each."""
    share = RankStepResult(rank)
    for batch, members in enumerate(micro_batches):
        placed = [
            LocatedSample(
                ready(group_id, 0, version=version, reward=reward),
                partition=rank,
                offset=10 * batch + offset_in_batch,
            )
            for offset_in_batch, (group_id, version, reward) in enumerate(members)
        ]
        share.add_micro_batch(placed, trainer_version=trainer_version)
        share.prompt_group_ids += [group_id for group_id, _, _ in members]
    return share


@pytest.fixture
def shares() -> list[RankStepResult]:
    first = share_of(
        0, [("000003-0000-0", 3, 1.0), ("000002-0001-1", 2, 0.0)], [("000003-0002-0", 1, 0.5)]
    )
    second = share_of(1, [("000003-0003-0", 2, 0.5)])
    second.consumed = [TopicOffset("t", 1, 7)]
    return [first, second]


def test_step_record_merges_rank_results_in_rank_order(shares: list[RankStepResult]) -> None:
    layout = StepRecord.merge(shares)
    assert layout.sample_ids == [
        "000003-0000-0/0",
        "000002-0001-1/0",
        "000003-0002-0/0",
        "000003-0003-0/0",
    ]
    assert layout.prompt_group_ids == [
        "000003-0000-0",
        "000002-0001-1",
        "000003-0002-0",
        "000003-0003-0",
    ]
    assert layout.ranks.tolist() == [0, 0, 0, 1]
    assert layout.micro_batches.tolist() == [0, 0, 1, 0]
    assert layout.partitions.tolist() == [0, 0, 0, 1]
    assert layout.offsets.tolist() == [0, 1, 10, 0]
    assert layout.consumed == [TopicOffset("t", 1, 7)]
    assert layout.staleness_counts == [1, 2, 1]
    assert layout.metrics["reward_mean"] == 0.5
    assert layout.metrics["reward_std"] == pytest.approx(0.125**0.5)
    assert layout.metrics["staleness_mean"] == 1.0
    assert (layout.metrics["completion_tokens_mean"], layout.metrics["completion_tokens_max"]) == (
        2.0,
        2.0,
    )


def build_outcomes_share() -> RankStepResult:
    """Make a prompt group of five samples, one of each outcome."""
    endings = [
        ("stop", 1.0, 4),
        ("length", 0.5, 4),
        ("late", 0.0, 4),
        ("lost", None, 2),
        ("stop", None, 4),
    ]
    share = RankStepResult(0, prompt_group_ids=["000003-0000-0"])
    placed = [
        LocatedSample(
            ready(
                "000003-0000-0",
                index,
                version=3,
                of=5,
                reward=reward,
                finish_reason=FinishReason(reason),
                tokens=np.arange(length, dtype=np.int32),
            ),
            partition=0,
            offset=index,
        )
        for index, (reason, reward, length) in enumerate(endings)
    ]
    share.add_micro_batch(placed, trainer_version=3)
    return share


def test_samples_without_a_reward_count_by_outcome_and_in_no_mean() -> None:
    share = build_outcomes_share()
    metrics = StepRecord.merge([share]).metrics
    assert metrics["reward_mean"] == pytest.approx(0.5)
    assert metrics["reward_std"] == pytest.approx(float(np.std([1.0, 0.5, 0.0])))
    assert {
        name: metrics[f"samples_ended/{name}"]
        for name in ("finished", "truncated", "late", "lost", "refused")
    } == {"finished": 1, "truncated": 1, "late": 1, "lost": 1, "refused": 1}
    assert metrics["completion_tokens_mean"] == 2.0  # not of the lost one
    (end,) = build_trained_outcomes([share], 3)
    assert end.mean_reward == pytest.approx(0.5)
    assert RankStepResult.from_bytes(share.to_bytes()) == share
    share.pop_micro_batches()
    assert share.outcomes == []


def test_share_of_groups_with_equal_rewards_counts_groups_with_two_rewards_or_more() -> None:
    def record(*groups: tuple[float | None, ...]) -> dict[str, float]:
        share = RankStepResult(0)
        share.add_micro_batch(
            [
                LocatedSample(
                    ready(f"000003-{number:04d}-0", index, version=3, of=8, reward=reward), 0, 0
                )
                for number, rewards in enumerate(groups)
                for index, reward in enumerate(rewards)
            ],
            trainer_version=3,
        )
        return StepRecord.merge([share]).metrics

    assert record((1, 1), (0, 1), (0, 0), (0, 0.5))["equal_reward_ratio"] == 0.5
    assert record((1, 1, None), (0, None))["equal_reward_ratio"] == 1.0
    assert "equal_reward_ratio" not in record((1,), (0, None))


def test_prompt_groups_that_are_too_large_are_counted(shares: list[RankStepResult]) -> None:
    assert StepRecord.merge(shares).metrics["prompt_groups_too_large"] == 0.0
    for share, count in zip(shares, (2, 1), strict=True):
        share.num_too_large = count
    assert StepRecord.merge(shares).metrics["prompt_groups_too_large"] == 3.0
    assert RankStepResult.from_bytes(shares[0].to_bytes()).num_too_large == 2


def test_step_record_has_no_reward_metrics_without_rewards(
    shares: list[RankStepResult],
) -> None:
    merged = StepRecord.merge(shares, has_rewards=False).metrics
    assert not [name for name in merged if name.startswith(("reward", "samples_ended"))]
    assert merged["staleness_mean"] == 1.0
    assert {end.mean_reward for end in build_trained_outcomes(shares, 3, has_rewards=False)} == {
        None
    }


def test_step_record_merges_a_rank_that_trained_nothing(shares: list[RankStepResult]) -> None:
    assert StepRecord.merge([shares[0], RankStepResult(1)]).ranks.tolist() == [0, 0, 0]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=6
    ),
    st.sampled_from(Outcome),
    st.lists(
        st.builds(TopicOffset, st.text(max_size=5), st.integers(0, 9), st.integers(0, 2**60)),
        max_size=3,
    ),
)
def test_rank_step_result_round_trips_through_bytes(
    members: list[tuple[int, int, float]], outcome: Outcome, consumed: list[TopicOffset]
) -> None:
    share = share_of(
        1, [(f"000003-{index:04d}-0", version, reward) for index, version, reward in members]
    )
    share.ended, share.consumed = [ended(outcome=outcome)], consumed
    again = RankStepResult.from_bytes(share.to_bytes())
    assert again == share
    assert again.ended[0].outcome is outcome


def test_trained_outcomes_name_each_groups_version_and_mean_reward() -> None:
    share = RankStepResult(0)
    samples = [
        ready("000002-0001-1", 0, version=2, reward=1.0),
        ready(
            "000002-0001-1", 1, version=2, min_policy_version=3, max_policy_version=3, reward=0.0
        ),
    ]
    share.add_micro_batch(
        [LocatedSample(sample, 0, offset) for offset, sample in enumerate(samples)],
        trainer_version=3,
    )
    share.prompt_group_ids = ["000002-0001-1"]
    (end,) = build_trained_outcomes([share], 3)
    assert (end.prompt_group_id, end.train_step, end.group_index, end.attempt) == (
        "000002-0001-1",
        2,
        1,
        1,
    )
    assert (end.outcome, end.policy_version, end.trainer_version, end.mean_reward) == (
        Outcome.TRAINED,
        2,
        3,
        0.5,
    )


READY, REQUESTS = "relax.r.advantage.samples", "relax.r.prompt.end-requests"


def test_training_history_reflects_the_applied_events() -> None:
    checkpoint = CheckpointRef(1, "file:///c/manifest.json", bytes(32))
    history = TrainingHistory()
    assert (
        history.policy_version,
        history.is_fresh,
        history.checkpoints(),
        history.positions(),
    ) == (0, True, [], {})
    history.apply(published(0))
    history.apply(
        committed(
            0,
            consumed=[
                TopicOffset(READY, 0, 5),
                TopicOffset(READY, 1, 9),
                TopicOffset(REQUESTS, 1, 2),
            ],
        )
    )
    history.apply(
        committed(
            1,
            checkpoint=checkpoint,
            consumed=[TopicOffset(READY, 0, 8), TopicOffset(REQUESTS, 1, 7)],
        )
    )
    history.apply(committed(2, consumed=[TopicOffset(READY, 1, 12)]))
    history.apply(ended("000001-0002-0"))
    assert (history.policy_version, history.is_fresh) == (3, False)
    assert history.checkpoints() == [checkpoint]
    assert history.positions() == {
        ("advantage.samples", 0): 8,
        ("advantage.samples", 1): 12,
        ("prompt.end-requests", 1): 7,
    }
    assert history.ended_group_ids == {"000001-0002-0"}
    assert [event.policy_version for event in history.published] == [0]


def test_phases_add_up_even_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 1.5, 10.0, 10.25, 20.0, 24.0])
    monkeypatch.setattr("relax_events.training.step_record.time.monotonic", lambda: next(clock))
    phases = PhaseTimer()
    with phases.measure("wait"):
        pass
    with phases.measure("wait"):
        pass
    with pytest.raises(ValueError, match="no"), phases.measure("update"):
        raise ValueError("no")
    assert dict(phases.seconds) == {"wait": 1.75, "update": 4.0}


def test_step_record_arrays_have_the_schema_dtypes(shares: list[RankStepResult]) -> None:
    layout = StepRecord.merge(shares)
    assert [
        array.dtype
        for array in (layout.partitions, layout.offsets, layout.ranks, layout.micro_batches)
    ] == [
        np.int32,
        np.int64,
        np.int32,
        np.int32,
    ]


def test_training_history_starting_after_version_zero_requires_a_checkpoint() -> None:
    history = TrainingHistory()
    history.require_steps_from(0)
    lost = CheckpointRef(5, "file:///objects/checkpoints/5/manifest.json", bytes(32))
    history.apply(published(5))
    history.apply(committed(5, checkpoint=lost))
    with pytest.raises(
        RunFailed,
        match=r"no checkpoint can be read .*checkpoints/5/manifest.json.*begin again at version 0",
    ):
        history.require_steps_from(0)
    history.require_steps_from(5)


def test_step_has_the_mean_of_each_component_over_the_samples_that_have_it() -> None:
    first, second = RankStepResult(0), RankStepResult(1)
    components = [{"accuracy": 1.0, "format": -1.0}, {"accuracy": 0.0}, {}, {"accuracy": 0.5}]
    for share, own in ((first, components[:2]), (second, components[2:])):
        placed = [
            LocatedSample(
                ready("000003-0000-0", index, version=3, components=one),
                partition=0,
                offset=index,
            )
            for index, one in enumerate(own)
        ]
        share.add_micro_batch(placed, trainer_version=3)
    shares = [RankStepResult.from_bytes(share.to_bytes()) for share in (first, second)]
    metrics = StepRecord.merge(shares).metrics
    assert (metrics["reward_mean/accuracy"], metrics["reward_mean/format"]) == (0.5, -1.0)
    assert not any("/" in name for name in StepRecord.merge(shares, has_rewards=False).metrics)
    first.pop_micro_batches()
    assert first.components == []
