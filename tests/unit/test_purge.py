"""Which records may go: what versions, groups, recovery and seats each forbid, and what of the books can still be proven."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from event_samples import committed, ended, published, rolled_out
from hypothesis import given
from hypothesis import strategies as st

from relax_events.config import RunConfig
from relax_events.control.ledger import Ledger
from relax_events.control.topics.purge import QueuedGroup, cuts_within, oldest_retained, queue_bounds, recovery_bounds, version_bounds
from relax_events.control.topics.purged import PurgedLog
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PromptGroupIssued
from relax_events.policy import Place as Seat
from relax_events.topics import TopicPlan

PLAN = TopicPlan(run_id="r", max_staleness=1, shards=1, queue_partitions=2, replication_factor=1, compression="none")
ROLLED, TRAINED, QUEUE = PLAN.topic("rollout.samples"), PLAN.topic("advantage.samples"), PLAN.topic("prompt.groups")


def issued(step: int, index: int = 0, *, row: int = 0) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id=f"{step:06d}-{index:04d}-0",
        train_step=step,
        group_index=index,
        attempt=0,
        row=row,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[],
        seed=1,
    )


@pytest.mark.parametrize(
    ("retain", "newest", "asked", "oldest"),
    [
        (0, 10, None, 0),  # keeps all
        (3, 10, None, 8),  # 8, 9, 10 stay
        (3, 1, None, 0),
        (2, 10, None, 9),  # the window of 10 is 9..10
        (0, 10, 4, 4),
        (3, 10, 4, 4),
        (0, 10, 10, 9),  # never one of the window
        (0, 0, 0, 0),
    ],
)
def test_oldest_retained_version_follows_from_number_and_window(
    make_run_config: Callable[..., RunConfig], retain: int, newest: int, asked: int | None, oldest: int
) -> None:
    config = make_run_config(run={"retain_versions": retain, "max_staleness": 1})
    assert oldest_retained(config, newest_version=newest, before_version=asked) == oldest


def test_versions_bound_is_the_start_of_the_slots_oldest_retained_owner() -> None:
    # Three slots of one partition; version v begins in partition v % 3 at 10 * (v // 3).
    events = [published(version, start_offsets=[TopicOffset(ROLLED, version % 3, 10 * (version // 3))]) for version in range(8)]
    assert version_bounds(PLAN, events, before_version=5) == {(ROLLED, 0): 20, (ROLLED, 1): 20, (ROLLED, 2): 10}
    assert version_bounds(PLAN, events, before_version=0) == {(ROLLED, 0): 0, (ROLLED, 1): 0, (ROLLED, 2): 0}
    # Slot 2 was owned by version 5 last: its records stay, though 7 is the oldest to be retained.
    assert version_bounds(PLAN, events, before_version=7) == {(ROLLED, 0): 20, (ROLLED, 1): 20, (ROLLED, 2): 10}


def test_versions_bound_holds_for_topics_that_carry_another_runs_name() -> None:
    events = [published(0, start_offsets=[TopicOffset("relax.first.rollout.samples", 0, 0)])]
    events.append(published(3, start_offsets=[TopicOffset("relax.first.rollout.samples", 0, 7)]))
    assert version_bounds(PLAN, events, before_version=3) == {(ROLLED, 0): 7}


def test_recovery_bound_is_where_steps_behind_the_checkpoint_and_the_next_read_begin() -> None:
    def step(number: int, places: list[tuple[int, int]]) -> object:
        partitions, offsets = zip(*places, strict=True)
        return committed(
            number,
            partitions=np.array(partitions, np.int32),
            offsets=np.array(offsets, np.int64),
        )

    steps = [step(0, [(0, 0), (0, 1)]), step(1, [(1, 5), (0, 3)]), step(2, [(1, 8)])]
    places = [(TRAINED, partition) for partition in range(3)]

    def bounds(version: int) -> list[int]:
        found = recovery_bounds(PLAN, steps, checkpoint_version=version, positions={0: 4, 1: 9})  # type: ignore[arg-type]
        return [found[place] for place in places]

    assert bounds(0) == [0, 5, 0]
    assert bounds(1) == [3, 5, 0]
    assert bounds(2) == [4, 8, 0]
    assert bounds(3) == [4, 9, 0]  # nothing to train again: reading goes on behind the last step


def queued(partition: int, *groups: PromptGroupIssued | None) -> list[QueuedGroup]:
    return [QueuedGroup(partition, offset, group) for offset, group in enumerate(groups)]


def test_queue_bound_ends_before_the_first_group_that_is_open_or_retained() -> None:
    ended_ids = {f"{step:06d}-0000-0" for step in range(5)}
    trained = {Seat(step, 0): step for step in range(5)}
    records = queued(0, issued(0, row=0), issued(1, row=1), None, issued(2, row=2), issued(3, row=3), issued(9, row=9))
    bounds = queue_bounds(PLAN, records, ended=ended_ids, trained=trained, before_version=4)
    assert bounds == {(QUEUE, 0): 4, (QUEUE, 1): 0}  # step 3 made version 4, which stays
    without_one = queue_bounds(PLAN, records, ended=ended_ids - {"000001-0000-0"}, trained=trained, before_version=4)
    assert without_one[QUEUE, 0] == 1
    seat_open = queue_bounds(PLAN, records, ended=ended_ids, trained={seat: step for seat, step in trained.items() if step}, before_version=4)
    assert seat_open[QUEUE, 0] == 0


def test_queue_bound_keeps_the_record_with_the_highest_row() -> None:
    trained = {Seat(step, 0): step for step in range(3)}
    ids = {f"{step:06d}-0000-0" for step in range(3)}
    records = [*queued(0, issued(0, row=0), issued(1, row=7)), *queued(1, issued(2, row=2))]
    assert queue_bounds(PLAN, records, ended=ids, trained=trained, before_version=9) == {(QUEUE, 0): 1, (QUEUE, 1): 1}


def test_cut_ends_at_the_lowest_bound_and_names_it() -> None:
    place, other = (ROLLED, 0), (ROLLED, 1)
    bounds = {"reward": {place: 12, other: 30}, "advantage": {place: 9}}
    cuts = cuts_within({place: 4, other: 5}, {place: 20, other: 20}, bounds)
    assert [(cut.place, cut.begin, cut.below, cut.held_by, cut.num_records) for cut in cuts] == [
        (place, 4, 9, "advantage", 5),
        (other, 5, 20, "versions", 15),
    ]


@given(
    wanted=st.integers(0, 100),
    begin=st.integers(0, 100),
    bounds=st.dictionaries(st.sampled_from(["reward", "advantage", "recovery"]), st.integers(0, 100), max_size=3),
)
def test_cut_never_passes_a_bound_nor_goes_backwards(wanted: int, begin: int, bounds: dict[str, int]) -> None:
    place = (ROLLED, 0)
    (cut,) = cuts_within({place: begin}, {place: wanted}, {name: {place: bound} for name, bound in bounds.items()})
    assert cut.below >= begin
    assert cut.num_records == 0 or all(cut.below <= bound for bound in (wanted, *bounds.values()))


def books(purged: PurgedLog | None) -> Ledger:
    """Return the books of a run of one trained prompt group whose issue and samples are not on the log."""
    ledger = Ledger(max_staleness=1, purged=purged)
    group = "000000-0000-0"
    ledger.note(published(0, start_offsets=[TopicOffset(ROLLED, 0, 0)]))
    ledger.note(published(1))
    ledger.note(ended(group, Outcome.TRAINED))
    ledger.note(committed(0, prompt_group_ids=[group], sample_ids=[f"{group}/0", f"{group}/1"], staleness_counts=[2]))
    return ledger


def test_ledger_says_what_it_cannot_prove_when_the_log_was_purged() -> None:
    begins = {("prompt.groups", 0): 5, ("prompt.groups", 1): 5, ("rollout.samples", 0): 8}
    ledger = books(PurgedLog(PLAN, begins))
    assert ledger.problems() == []
    assert [text.partition(",")[0] for text in ledger.unproven()] == [
        "that 1 prompt groups were issued before they ended",
        "that 2 trained samples were generated",
    ]
    figures = ledger.figures()
    assert (figures["outcomes"]["issued"], figures["outcomes"]["trained"], figures["prompt_groups_purged"], figures["samples_purged"]) == (1, 1, 1, 2)


@pytest.mark.parametrize("begins", [None, {}, {("rollout.samples", 1): 8, ("rollout.samples", 2): 3}])
def test_ledger_reports_losses_where_nothing_was_purged(begins: dict[tuple[str, int], int] | None) -> None:
    ledger = books(None if begins is None else PurgedLog(PLAN, begins))
    assert {text.partition(":")[0] for text in ledger.problems()} == {
        "sample trained that was never generated",
        "prompt group trained that was never issued",
    }
    assert ledger.unproven() == []


def test_ledger_still_finds_a_lost_sample_when_the_log_was_purged() -> None:
    ledger = books(PurgedLog(PLAN, {("prompt.groups", 0): 5, ("prompt.groups", 1): 5, ("rollout.samples", 0): 8}))
    ledger.note(rolled_out("000000-0000-0", 2, of=3))
    assert [text.partition(":")[0] for text in ledger.problems()] == ["sample of a trained prompt group was not trained"]
