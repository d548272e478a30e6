"""The step simulator against schedules worked out by hand, one token per second unless a test says
otherwise, times in seconds; and the library's rules against the slower side at real lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp
from typing import Any

import pytest

from benchmarks.profiles import Lengths, Timing
from benchmarks.step_simulator import Schedule, SimulatedRun, StepSimulator, repeat_lengths
from relax_events.config import RunConfig
from relax_events.config.unset_keys import with_values
from relax_events.controller.scaling_bounds import require_rollout_capacity
from relax_events.events.parts import Outcome
from relax_events.kafka.embedded.settings import SHARE_GROUP_SIZE
from relax_events.planning.derived import derive
from relax_events.planning.inventory import Machine
from relax_events.staleness import IssuedGroup

pytestmark = pytest.mark.unit
TWO_GROUPS = [[3, 5], [2, 4]]


def path(
    steps: list[list[list[int]]], *, timing: dict[str, Any] | None = None, **schedule: Any
) -> list[float]:
    """Calculate when versions are published, with one engine."""
    return simulate(steps, timing=timing, **schedule).published


def simulate(
    steps: list[list[list[int]]],
    *,
    timing: dict[str, Any] | None = None,
    outcome: Callable[[IssuedGroup], Outcome] = lambda _: Outcome.TRAINED,
    **schedule: Any,
) -> SimulatedRun:
    """Simulate steps on one engine."""
    speeds = {
        "lengths": Lengths(median_tokens=1, sigma=0, cap_tokens=1, record_divisor=1),
        "time_scale": 1.0,
        "num_engines": 1,
        "devices_per_engine": 1.0,
        "peak_tokens_per_second": 1e12,
        "half_load": 1e12,
        "train_token_seconds": 0.1,
        "forward_token_seconds": 0.0,
        "update_seconds": 0.5,
        "to_train_seconds": 0.0,
        "load_seconds": 2.0,
    }
    rules = {
        "num_steps": len(steps),
        "prompts_per_step": len(steps[0]),
        "max_staleness": 0,
        "colocated": False,
        "weight_update_mode": "in_flight",
        "leases_per_engine": 4,
        "slots_per_engine": 100,
    }
    return StepSimulator(
        Timing(**{**speeds, **(timing or {})}),
        Schedule(**{**rules, **schedule}),
        repeat_lengths(steps),
        outcome=outcome,
    ).run()


def test_simulator_alternates_when_engine_and_trainer_share_devices() -> None:
    # Step: 5 for the longest sample, 1 for the switch, 14 tokens x 0.1, 0.5; from the second on
    # also 2 for the switch back.
    published = path([TWO_GROUPS, TWO_GROUPS], timing={"to_train_seconds": 1.0}, colocated=True)
    assert published == pytest.approx([0.0, 7.9, 17.8])


def test_simulator_trains_prompt_groups_as_they_come_when_on_policy() -> None:
    # The second is there at 4 and takes 0.6, the first at 5 and takes 0.8, then 0.5.
    assert path([TWO_GROUPS, TWO_GROUPS]) == pytest.approx([0.0, 6.3, 14.6])


def test_simulator_overlaps_steps_when_staleness_is_allowed() -> None:
    # Step 1 was generated next to step 0. Step 2 is issued at 6.3, but version 1 is loaded until
    # 8.3 and version 2 of 8.2 until 10.3, before it runs to 14.3 and 15.3.
    assert path([TWO_GROUPS] * 3, max_staleness=1) == pytest.approx([0.0, 6.3, 8.2, 16.6])


def test_simulator_queues_prompt_groups_when_leases_are_few() -> None:
    # One after the other: at 5 and at 9.
    assert path([TWO_GROUPS], leases_per_engine=1) == pytest.approx([0.0, 10.1])
    assert path([TWO_GROUPS], lanes_per_engine=1) == pytest.approx([0.0, 10.1])


def test_simulator_holds_a_lane_until_all_prompt_groups_of_its_batch_have_ended() -> None:
    # The batch of 2 and 9 tokens holds the only lane until 9, then the third runs until 12.
    groups = [[[2], [9], [3]]]
    timing = {"train_token_seconds": 0.0}
    settings = {"batch_size": 2, "timing": timing}
    assert path(groups, lanes_per_engine=1, **settings) == pytest.approx([0.0, 12.5])
    assert path(groups, lanes_per_engine=2, **settings) == pytest.approx([0.0, 9.5])


def test_simulator_slows_samples_down_when_many_run() -> None:
    # Two share 2 / (2 + 1) tokens per second each until 3, the second continues alone at 1: 5; then
    # 6 x 0.1 and 0.5.
    assert path(
        [[[2, 4]]], timing={"peak_tokens_per_second": 2.0, "half_load": 1.0}
    ) == pytest.approx([0.0, 6.1])


def test_simulator_spreads_prompt_groups_over_engines_when_there_are_several() -> None:
    timing = {
        "peak_tokens_per_second": 2.0,
        "half_load": 1.0,
        "num_engines": 2,
        "train_token_seconds": 0.0,
    }
    # Two samples on each engine, at 2/3 tokens per second.
    assert path([[[4, 4], [4, 4]]], timing=timing) == pytest.approx([0.0, 6.5])


def test_simulator_passes_prompt_groups_through_the_forward_roles() -> None:
    # The second: 4 to 4.6, trained to 5.2; the first: 5 to 5.8, trained to 6.6.
    assert path([TWO_GROUPS], timing={"forward_token_seconds": 0.1}) == pytest.approx([0.0, 7.1])


@pytest.mark.parametrize(
    ("weight_update_mode", "published"),
    [
        # Swap: loading from 2.5 to 4.5 delays the sample of step 1 from 10 to 12; that of step 2
        # runs next to it.
        ("in_flight", [0.0, 2.5, 12.5, 13.0]),
        # Finish: the sample of step 1 ends at 10, loading takes until 12, that of step 2 until 13.
        ("drain", [0.0, 2.5, 10.5, 13.5]),
        # Recompute: as swap, and another second for the prefix of the running sample.
        ("recompute", [0.0, 2.5, 13.5, 14.0]),
    ],
)
def test_simulator_models_each_weight_update_mode(
    weight_update_mode: str, published: list[float]
) -> None:
    timing = {"train_token_seconds": 0.0, "recompute_seconds": 1.0}
    assert path(
        [[[2]], [[10]], [[1]]],
        timing=timing,
        max_staleness=1,
        weight_update_mode=weight_update_mode,
    ) == pytest.approx(published)


def test_simulator_queues_prompt_groups_when_slots_are_few() -> None:
    # Two samples at a time: the first until 5, the second from then on until 9.
    simulated = simulate([TWO_GROUPS], slots_per_engine=2)
    assert simulated.published == pytest.approx([0.0, 10.1])
    # 14 sample-seconds of 2 slots x 10.1 s.
    assert simulated.slot_use == pytest.approx(14 / 20.2)


def test_simulator_generates_the_successors_of_filtered_prompt_groups_one_after_another() -> None:
    def filter_twice(group: IssuedGroup) -> Outcome:
        return Outcome.FILTERED if group.attempt < 2 else Outcome.TRAINED

    simulated = simulate(
        [[[3], [3]]],
        outcome=filter_twice,
        timing={"train_token_seconds": 0.0},
        leases_per_engine=100,
    )
    assert simulated.published == pytest.approx([0.0, 9.5])
    assert simulated.generations_in_series == [3]


def test_simulator_trains_the_first_prompt_groups_that_pass_and_ends_the_others() -> None:
    def filter_first(group: IssuedGroup) -> Outcome:
        return Outcome.FILTERED if group.slot.group_index == 1 else Outcome.TRAINED

    simulated = simulate(
        [[[3], [1]], [[3], [1]]], outcome=filter_first, timing={"train_token_seconds": 0.0}
    )
    # At 1 the second is filtered: two replace it, and run from 1 to 4 and to 2. The first of them is
    # trained although it ends last; the other one ends with step 0. Version 1 is loaded from 4.5 to
    # 6.5. Two of three passed, so step 1 has a third prompt group from the beginning.
    assert simulated.published == pytest.approx([0.0, 4.5, 10.0])
    assert simulated.generations_in_series == [2, 1]
    assert simulated.num_expired == 1


def simulate_filtered_steps(
    *, pass_ratio: float, max_staleness: int, prompts_per_step: int = 128, num_steps: int = 50
) -> SimulatedRun:
    """Simulate steps of which this share of the prompt groups can be trained, with two samples of
    log-normal lengths each."""

    def choose_outcome(group: IssuedGroup) -> Outcome:
        chance = random.Random(f"outcome {group.prompt_group_id}").random()
        return Outcome.TRAINED if chance < pass_ratio else Outcome.FILTERED

    def read_two_lengths(group: IssuedGroup) -> list[int]:
        chance = random.Random(group.prompt_group_id)
        return [max(1, round(min(exp(chance.gauss(4.0, 1.0)), 1000))) for _ in range(2)]

    timing = Timing(
        lengths=Lengths(median_tokens=1, sigma=0, cap_tokens=1, record_divisor=1),
        time_scale=1.0,
        num_engines=2,
        devices_per_engine=1.0,
        peak_tokens_per_second=1e12,
        half_load=1e12,
        train_token_seconds=0.0,
        forward_token_seconds=0.0,
        update_seconds=1.0,
        to_train_seconds=0.0,
        load_seconds=0.0,
    )
    schedule = Schedule(
        num_steps=num_steps,
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        colocated=False,
        weight_update_mode="in_flight" if max_staleness else "drain",
        leases_per_engine=2000,
        slots_per_engine=4000,
    )
    return StepSimulator(timing, schedule, read_two_lengths, outcome=choose_outcome).run()


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_half_of_the_prompt_groups_filtered_take_at_most_two_generations_in_series(
    max_staleness: int,
) -> None:
    simulated = simulate_filtered_steps(pass_ratio=0.5, max_staleness=max_staleness)
    generations = simulated.generations_in_series
    assert sum(number <= 2 for number in generations) >= 0.95 * len(generations)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_steps_that_filter_nothing_issue_no_spares(max_staleness: int) -> None:
    simulated = simulate_filtered_steps(
        pass_ratio=1.0, max_staleness=max_staleness, prompts_per_step=16
    )
    assert set(simulated.generations_in_series) == {1}
    assert (simulated.num_expired, simulated.num_wasted_tokens) == (0, 0)


def test_simulator_expires_stragglers_when_ready_groups_are_trained_first() -> None:
    # At K = 1 the steps 0 and 1 start at 0; 1 and 2 tokens fill step 0 and 1 by 3.5, then the first
    # prompt group of 9 tokens is two versions behind.
    simulated = simulate(
        [[[9]], [[1]], [[1]]],
        max_staleness=1,
        sample_order="ready_first",
        timing={"train_token_seconds": 0.0, "load_seconds": 0.0},
    )
    assert simulated.num_expired == 1
    assert simulated.num_wasted_tokens == 9


RATE, CAP = 40.0, 20_000
"""Tokens a second of each sample; the longest sample."""
TRAIN_SECONDS, MEAN_TOKENS = 100.0, 5190
"""Of a step; of a sample."""
SAMPLES_PER_PROMPT, PROMPTS_PER_STEP = 8, 125
SLOTS_PER_ENGINE = 256


def read_lengths(group: IssuedGroup) -> list[int]:
    """Return log-normal lengths of at most 20,000 tokens."""
    chance = random.Random(group.prompt_group_id)
    return [
        max(1, round(min(exp(chance.gauss(8.15, 1.0)), CAP))) for _ in range(SAMPLES_PER_PROMPT)
    ]


def compare_with_bound(
    *,
    num_slots: int,
    max_staleness: int,
    load_seconds: float = 0.0,
    slots_per_engine: int = SLOTS_PER_ENGINE,
    prompts_per_step: int = PROMPTS_PER_STEP,
    max_workers: int = 32,
    share_group_size: int = SHARE_GROUP_SIZE,
    **settings: Any,
) -> float:
    """Simulate 20 steps of samples with a mean of 5,190 tokens, by the settings that a run file
    gets which leaves them out.

    The bound of a step's time is the largest of
    - the trainer's time for a step, and its update,
    - the time in which all slots together generate a step's tokens, and one load,
    - the time of the longest sample, divided by the `max_staleness` + 1 steps that it may take, and
      one load.

    Returns:
        The bound divided by the mean step time of the last 15 steps.
    """
    slots = min(num_slots, slots_per_engine)
    num_tokens = prompts_per_step * SAMPLES_PER_PROMPT * MEAN_TOKENS
    timing = Timing(
        lengths=Lengths(median_tokens=1, sigma=0, cap_tokens=CAP, record_divisor=1),
        time_scale=1.0,
        num_engines=num_slots // slots,
        devices_per_engine=1.0,
        peak_tokens_per_second=RATE * 1e12,
        half_load=1e12,
        train_token_seconds=TRAIN_SECONDS / num_tokens,
        forward_token_seconds=0.0,
        update_seconds=1.0,
        to_train_seconds=0.0,
        load_seconds=load_seconds,
    )
    run = RunConfig.model_validate(
        {
            "run": {
                "id": "mine",
                "num_steps": 20,
                "prompts_per_step": prompts_per_step,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "max_staleness": max_staleness,
            }
            | settings,
            "model": {"path": "model"},
            "data": {"source": "jsonl:rows"},
            "engine": {"max_running_samples": slots},
            "workers": {"rollout": num_slots // slots},
            "scaling": {"max_workers": max_workers},
        }
    )
    derived = derive(run, {}, Machine(16, 2**37, (), {"trainer": 1}))
    require_rollout_capacity(run, share_group_size)
    schedule = Schedule.from_config(
        with_values(run, {one.key: one.value for one in derived}),
        share_group_size=share_group_size,
    )
    published = StepSimulator(timing, schedule, read_lengths).run().published
    bound = max(
        TRAIN_SECONDS + timing.update_seconds,
        num_tokens / (num_slots * RATE) + load_seconds,
        CAP / RATE / (max_staleness + 1) + load_seconds,
    )
    return bound * 15 / (published[20] - published[5])


@pytest.mark.parametrize(
    ("num_slots", "max_staleness", "load_seconds"),
    [
        (64, 1, 0.0),
        (256, 1, 60.0),
        (1024, 1, 0.0),
        (1024, 4, 60.0),
        (2048, 4, 0.0),
        (4096, 2, 0.0),
        *(
            pytest.param(num_slots, max_staleness, load_seconds, marks=pytest.mark.long)
            for num_slots in (64, 256, 1024, 2048, 4096)
            for max_staleness in (1, 2, 4)
            for load_seconds in (0.0, 60.0)
        ),
    ],
)
def test_steps_by_default_take_at_most_a_tenth_longer_than_the_slower_side(
    num_slots: int, max_staleness: int, load_seconds: float
) -> None:
    assert (
        compare_with_bound(
            num_slots=num_slots, max_staleness=max_staleness, load_seconds=load_seconds
        )
        >= 0.9
    )


@pytest.mark.parametrize(
    ("num_slots", "slots_per_engine", "prompts_per_step", "max_staleness"),
    [
        (4096, 64, 125, 2),  # 64 workers
        (4096, 32, 125, 4),  # 128 workers with room for four prompt groups
        (1024, 64, 32, 4),
        (1024, 256, 32, 4),
        *(
            pytest.param(num_slots, slots, prompts, staleness, marks=pytest.mark.long)
            for num_slots, slots in ((1024, 64), (2048, 64), (4096, 64), (4096, 32))
            for prompts in (32, 64)
            for staleness in (1, 2, 4)
        ),
    ],
)
def test_many_workers_and_small_steps_are_no_slower_by_default(
    num_slots: int, slots_per_engine: int, prompts_per_step: int, max_staleness: int
) -> None:
    assert (
        compare_with_bound(
            num_slots=num_slots,
            slots_per_engine=slots_per_engine,
            prompts_per_step=prompts_per_step,
            max_staleness=max_staleness,
        )
        >= 0.9
    )


def test_lanes_that_wait_for_possible_workers_are_missing_in_large_steps() -> None:
    by_default, of_eight = (
        compare_with_bound(
            num_slots=2048, prompts_per_step=250, max_staleness=4, max_workers=max_workers
        )
        for max_workers in (32, 8)
    )
    assert by_default < 0.9
    assert of_eight >= 0.95


def test_drain_leaves_half_of_the_bound_unused() -> None:
    assert compare_with_bound(num_slots=1024, max_staleness=2, weight_update_mode="drain") < 0.5
