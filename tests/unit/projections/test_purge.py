"""Which records may be purged: bounds by versions, consumer groups, recovery and slots, and what
the ledger can still verify afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import pytest
from event_samples import committed, published
from hypothesis import given
from hypothesis import strategies as st
from valid_run import MAX_STALENESS, ValidRun

from relax_events.config import RunConfig
from relax_events.events.parts import TopicOffset
from relax_events.events.types import PromptGroupIssued
from relax_events.ops.purge import (
    QueuedGroup,
    bounded_ranges,
    oldest_retained,
    queue_bounds,
    recovery_bounds,
    version_bounds,
)
from relax_events.projections.ledger import Ledger
from relax_events.projections.purged_ranges import PurgedRanges
from relax_events.staleness import BatchSlot
from relax_events.topics import TopicPlan
from relax_events.topics.names import END_REQUESTS

PLAN = TopicPlan(
    run_id="r",
    max_staleness=1,
    partitions_per_version=1,
    queue_partitions=2,
    replication_factor=1,
    compression="none",
)
ROLLED, TRAINED, QUEUE = (
    PLAN.topic("rollout.samples"),
    PLAN.topic("advantage.samples"),
    PLAN.topic("prompt.groups"),
)


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
def test_oldest_retained_version_depends_on_retain_versions_and_max_staleness(
    make_run_config: Callable[..., RunConfig],
    retain: int,
    newest: int,
    asked: int | None,
    oldest: int,
) -> None:
    config = make_run_config(run={"retain_versions": retain, "max_staleness": 1})
    assert oldest_retained(config.run, newest_version=newest, before_version=asked) == oldest


def test_version_bound_is_the_start_of_the_oldest_retained_version_in_the_slot() -> None:
    # Three slots of one partition; version v begins in partition v % 3 at 10 * (v // 3).
    events = [
        published(version, start_offsets=[TopicOffset(ROLLED, version % 3, 10 * (version // 3))])
        for version in range(8)
    ]
    assert version_bounds(PLAN, events, before_version=5) == {
        (ROLLED, 0): 20,
        (ROLLED, 1): 20,
        (ROLLED, 2): 10,
    }
    assert version_bounds(PLAN, events, before_version=0) == {
        (ROLLED, 0): 0,
        (ROLLED, 1): 0,
        (ROLLED, 2): 0,
    }
    # Slot 2 was owned by version 5 last: its records stay, though 7 is the oldest to be retained.
    assert version_bounds(PLAN, events, before_version=7) == {
        (ROLLED, 0): 20,
        (ROLLED, 1): 20,
        (ROLLED, 2): 10,
    }


def test_version_bound_applies_to_topics_named_after_another_run() -> None:
    events = [published(0, start_offsets=[TopicOffset("relax.first.rollout.samples", 0, 0)])]
    events.append(published(3, start_offsets=[TopicOffset("relax.first.rollout.samples", 0, 7)]))
    assert version_bounds(PLAN, events, before_version=3) == {(ROLLED, 0): 7}


def test_recovery_bound_is_the_first_offset_read_after_the_checkpoint() -> None:
    def step(number: int, locations: list[tuple[int, int]]) -> object:
        partitions, offsets = zip(*locations, strict=True)
        return committed(
            number,
            partitions=np.array(partitions, np.int32),
            offsets=np.array(offsets, np.int64),
        )

    steps = [step(0, [(0, 0), (0, 1)]), step(1, [(1, 5), (0, 3)]), step(2, [(1, 8)])]
    topic_partitions = [(TRAINED, partition) for partition in range(3)]
    positions = {("advantage.samples", 0): 4, ("advantage.samples", 1): 9}

    def bounds(version: int) -> list[int]:
        found = recovery_bounds(PLAN, steps, checkpoint_version=version, positions=positions)  # type: ignore[arg-type]
        return [found[topic_partition] for topic_partition in topic_partitions]

    assert bounds(0) == [0, 5, 0]
    assert bounds(1) == [3, 5, 0]
    assert bounds(2) == [4, 8, 0]
    assert bounds(3) == [4, 9, 0]  # nothing to train again: reading continues behind the last step
    requests = recovery_bounds(PLAN, steps, checkpoint_version=0, positions={(END_REQUESTS, 1): 3})  # type: ignore[arg-type]
    assert [requests[PLAN.topic(END_REQUESTS), partition] for partition in range(3)] == [0, 3, 0]


def queued(partition: int, *groups: PromptGroupIssued | None) -> list[QueuedGroup]:
    return [QueuedGroup(partition, offset, group) for offset, group in enumerate(groups)]


def test_queue_bound_stops_at_the_first_unfinished_or_retained_group() -> None:
    ended_ids = {f"{step:06d}-0000-0" for step in range(5)}
    trained = {BatchSlot(step, 0): step for step in range(5)}
    records = queued(
        0,
        issued(0, row=0),
        issued(1, row=1),
        None,
        issued(2, row=2),
        issued(3, row=3),
        issued(9, row=9),
    )
    bounds = queue_bounds(PLAN, records, ended=ended_ids, trained=trained, before_version=4)
    assert bounds == {(QUEUE, 0): 4, (QUEUE, 1): 0}  # step 3 made version 4, which stays
    without_one = queue_bounds(
        PLAN, records, ended=ended_ids - {"000001-0000-0"}, trained=trained, before_version=4
    )
    assert without_one[QUEUE, 0] == 1
    slot_open = queue_bounds(
        PLAN,
        records,
        ended=ended_ids,
        trained={slot: step for slot, step in trained.items() if step},
        before_version=4,
    )
    assert slot_open[QUEUE, 0] == 0


def test_queue_bound_keeps_the_record_with_the_highest_dataset_row() -> None:
    trained = {BatchSlot(step, 0): step for step in range(3)}
    ids = {f"{step:06d}-0000-0" for step in range(3)}
    records = [*queued(0, issued(0, row=0), issued(1, row=7)), *queued(1, issued(2, row=2))]
    assert queue_bounds(PLAN, records, ended=ids, trained=trained, before_version=9) == {
        (QUEUE, 0): 1,
        (QUEUE, 1): 1,
    }


def test_purge_range_ends_at_the_lowest_bound_and_names_it() -> None:
    topic_partition, other = (ROLLED, 0), (ROLLED, 1)
    bounds = {"reward": {topic_partition: 12, other: 30}, "advantage": {topic_partition: 9}}
    cuts = bounded_ranges({topic_partition: 4, other: 5}, {topic_partition: 20, other: 20}, bounds)
    assert [
        (cut.topic_partition, cut.begin, cut.end, cut.held_by, cut.num_records) for cut in cuts
    ] == [
        (topic_partition, 4, 9, "advantage", 5),
        (other, 5, 20, "versions", 15),
    ]


@given(
    wanted=st.integers(0, 100),
    begin=st.integers(0, 100),
    bounds=st.dictionaries(
        st.sampled_from(["reward", "advantage", "recovery"]), st.integers(0, 100), max_size=3
    ),
)
def test_purge_range_never_exceeds_a_bound_or_moves_backwards(
    wanted: int, begin: int, bounds: dict[str, int]
) -> None:
    topic_partition = (ROLLED, 0)
    (cut,) = bounded_ranges(
        {topic_partition: begin},
        {topic_partition: wanted},
        {name: {topic_partition: bound} for name, bound in bounds.items()},
    )
    assert cut.end >= begin
    assert cut.num_records == 0 or all(cut.end <= bound for bound in (wanted, *bounds.values()))


def purged_ledger(lacking: Collection[str], begins: Mapping[tuple[str, int], int]) -> Ledger:
    """Return the ledger of a valid run without the records of step 0's prompt groups in some topics,
    whose partitions begin at later offsets."""
    run = ValidRun(3)
    for sample in (0, 1, 2, 3) if "reference.logprobs" in lacking else ():
        name = f"000000-{sample // 2:04d}-0/{sample % 2}"
        run.change_sample("advantage.samples", name, ref_logprobs=np.zeros(4, np.float32))
    ledger = Ledger(MAX_STALENESS, purged=PurgedRanges(run.plan, begins))
    for at, event in run.items():
        is_of_step = getattr(event, "prompt_group_id", "").startswith("000000")
        if not (is_of_step and run.plan.parse_entity(at.topic) in lacking):
            ledger.apply(event, at)
    return ledger


def everywhere(*entities: str) -> dict[tuple[str, int], int]:
    return {(entity, partition): 100 for entity in entities for partition in range(2)}


@pytest.mark.parametrize(
    ("lacking", "claims"),
    [
        (["prompt.groups"], ["2 prompt groups were issued before they ended"]),
        (["rollout.samples"], ["4 trained samples were generated as they were trained"]),
        (["reward.scores"], ["the rewards of 4 trained samples were scored"]),
        (["reference.logprobs"], ["the numbers of other models in 4 trained samples are theirs"]),
        (
            ["rollout.samples", "advantage.samples"],
            ["the record of 4 trained samples is the one that the train step names"],
        ),
    ],
)
def test_ledger_lists_unverifiable_claims_after_a_purge(
    lacking: list[str], claims: list[str]
) -> None:
    ledger = purged_ledger(lacking, everywhere(*lacking))
    assert ledger.problems() == []
    assert [text.partition(",")[0] for text in ledger.unverified()] == [
        f"that {claim}" for claim in claims
    ]
    totals = ledger.totals()
    assert (
        totals["outcomes"]["issued"],
        totals["outcomes"]["trained"],
        totals["staleness_counts"],
    ) == (7, 6, [4, 8])
    assert totals["prompt_groups_purged"] == (2 if "prompt.groups" in lacking else 0)
    assert totals["samples_purged"] == (4 if "rollout.samples" in lacking else 0)


@pytest.mark.parametrize(
    ("entity", "rule"),
    [
        ("prompt.groups", "prompt group trained that was never issued"),
        ("rollout.samples", "sample trained that was never generated"),
        ("reward.scores", "sample trained with a reward that no score gives"),
        (
            "reference.logprobs",
            "sample trained with numbers of another model that no record of it gives",
        ),
        ("advantage.samples", "trained offset holds another record than the train step says"),
    ],
)
@pytest.mark.parametrize(
    "purged", [{}, everywhere("control.metrics.trainer")], ids=["nothing", "something else"]
)
def test_ledger_reports_missing_records_that_were_not_purged(
    entity: str, rule: str, purged: dict[tuple[str, int], int]
) -> None:
    ledger = purged_ledger([entity], purged)
    assert [finding.rule for finding in ledger.findings()] == [rule]
    assert ledger.unverified() == []
