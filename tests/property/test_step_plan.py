"""The plan of a step trains each sample once, keeps to its rules, and is the same for any order of
arrival; for realistic lengths the ranks have nearly equal work."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.training.batch.step_plan import GroupSize, PlanRules, StepPlan, plan_step

LONGEST = 20_000
PATHS = st.lists(st.integers(1, 400), min_size=1, max_size=3).map(tuple)
LENGTHS = st.lists(PATHS, min_size=1, max_size=6).map(tuple)
GROUPS = st.lists(LENGTHS, max_size=24).map(
    lambda rows: [GroupSize(f"{index:04d}", row) for index, row in enumerate(rows)]
)
RULES = st.builds(
    PlanRules,
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(100, 1000),
    attention_cost=st.sampled_from((0.0, 1e-3)),
    whole_prompt_groups=st.booleans(),
    waits_each_round=st.booleans(),
)


@given(GROUPS, RULES)
def test_each_sample_is_trained_once_within_the_budget(
    groups: list[GroupSize], rules: PlanRules
) -> None:
    plan = plan_step(groups, rules)

    micro_batches = [one for mine in plan.micro_batches for one in mine]
    planned = sorted(
        (sample.prompt_group_id, sample.index, sample.length)
        for one in micro_batches
        for sample in one
    )
    assert planned == [
        (group.prompt_group_id, index, sum(paths))
        for group in groups
        for index, paths in enumerate(group.lengths)
    ]
    for one in micro_batches:
        units = {s.prompt_group_id if rules.whole_prompt_groups else s for s in one}
        assert len(units) <= 1 or sum(s.length for s in one) <= rules.max_tokens


@given(GROUPS, RULES)
def test_ranks_have_equally_many_micro_batches(groups: list[GroupSize], rules: PlanRules) -> None:
    plan = plan_step(groups, rules)

    assert len(plan.micro_batches) == rules.num_ranks
    assert len({len(mine) for mine in plan.micro_batches}) == 1
    for together in zip(*plan.micro_batches, strict=True):
        assert any(together), "no rank has a sample in this round"


@given(GROUPS, RULES)
def test_prompt_groups_stay_whole_and_in_order_where_the_loss_needs_them(
    groups: list[GroupSize], rules: PlanRules
) -> None:
    plan = plan_step(groups, rules)
    if not rules.whole_prompt_groups:
        return
    for mine in plan.micro_batches:
        for one in mine:
            names = list(dict.fromkeys(sample.prompt_group_id for sample in one))
            sizes = {group.prompt_group_id: len(group.lengths) for group in groups}
            assert [(sample.prompt_group_id, sample.index) for sample in one] == [
                (name, index) for name in names for index in range(sizes[name])
            ]


@given(GROUPS, RULES, st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_arrival(
    groups: list[GroupSize], rules: PlanRules, random: object
) -> None:
    shuffled = list(groups)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    assert plan_step(shuffled, rules) == plan_step(groups, rules)


@given(GROUPS, RULES)
def test_efficiency_is_that_of_the_costs(groups: list[GroupSize], rules: PlanRules) -> None:
    plan = plan_step(groups, rules)

    if groups:
        assert plan.efficiency == pytest.approx(efficiency_of(plan, rules))


def efficiency_of(plan: StepPlan, rules: PlanRules) -> float:
    """Compute a plan's efficiency from its samples alone."""
    costs = np.array(
        [
            [
                sum(n + rules.attention_cost * n**2 for sample in one for n in sample.path_lengths)
                for one in mine
            ]
            for mine in plan.micro_batches
        ]
    )
    slowest = costs.max(axis=0).sum() if rules.waits_each_round else costs.sum(axis=1).max()
    return float(costs.sum() / rules.num_ranks / slowest)


def draw_lengths(kind: str, rng: np.random.Generator, *, groups: int) -> np.ndarray:
    """Return the lengths of 8 samples of each prompt group, long-tailed up to the limit."""
    shape = groups, 8
    lengths = {
        "lognormal": lambda: np.exp(rng.normal(7.5, 1.0, shape)),
        "hard_prompts": lambda: np.exp(
            rng.normal(7.5, 0.9, (groups, 1)) + rng.normal(0, 0.5, shape)
        ),
        "pareto": lambda: 200 * (1 + rng.pareto(1.1, shape)),
        "truncated": lambda: np.where(rng.random(shape) < 0.1, LONGEST, 500),
        "truncated_prompts": lambda: (
            np.where(rng.random((groups, 1)) < 0.1, LONGEST, 500) * np.ones((1, 8))
        ),
        "equal": lambda: np.full(shape, 2000.0),
    }[kind]()
    return lengths.clip(50, LONGEST).astype(int)


KINDS = ("lognormal", "hard_prompts", "pareto", "truncated", "truncated_prompts", "equal")


@pytest.mark.parametrize("attention_cost", [0.0, 1e-5, 5e-5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_groups", [64, 100, 256])
def test_eight_ranks_are_used_to_95_percent(
    kind: str, attention_cost: float, num_groups: int
) -> None:
    rules = PlanRules(num_ranks=8, max_tokens=32_768, attention_cost=attention_cost)
    for seed in range(5):
        lengths = draw_lengths(kind, np.random.default_rng(seed), groups=num_groups)
        groups = [
            GroupSize(f"{index:04d}", tuple((length,) for length in row))
            for index, row in enumerate(lengths.tolist())
        ]
        assert efficiency_of(plan_step(groups, rules), rules) >= 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_balanced_where_ranks_wait_in_each(kind: str) -> None:
    rules = PlanRules(num_ranks=8, max_tokens=32_768, attention_cost=1e-5, waits_each_round=True)
    found = []
    for seed in range(10):
        lengths = draw_lengths(kind, np.random.default_rng(seed), groups=64)
        groups = [
            GroupSize(f"{index:04d}", tuple((length,) for length in row))
            for index, row in enumerate(lengths.tolist())
        ]
        found.append(efficiency_of(plan_step(groups, rules), rules))

    assert min(found) >= 0.9
    assert math.fsum(found) / len(found) >= 0.95


def test_prompt_groups_of_equal_lengths_are_not_split() -> None:
    groups = [GroupSize(f"{index:04d}", ((1000,),) * 8) for index in range(64)]

    plan = plan_step(groups, PlanRules(num_ranks=8, max_tokens=32_000))

    for mine in plan.micro_batches:
        assert len({sample.prompt_group_id for one in mine for sample in one}) == 8


def test_sample_above_the_budget_has_a_micro_batch_of_its_own() -> None:
    groups = [GroupSize("a", ((5000,),)), GroupSize("b", ((10,), (20,)))]

    plan = plan_step(groups, PlanRules(num_ranks=1, max_tokens=100))

    assert [[sample.length for sample in one] for one in plan.micro_batches[0]] == [
        [5000],
        [10, 20],
    ]


def test_paths_of_a_sample_cost_as_much_as_samples_of_one_path() -> None:
    """Attention runs along each path: 10 paths of 1,000 tokens are no path of 10,000."""
    branched = [GroupSize(f"{index:04d}", ((1000,) * 10,) * 2) for index in range(8)]
    straight = [GroupSize(f"{index:04d}", ((10_000,),) * 2) for index in range(8, 10)]
    rules = PlanRules(num_ranks=2, max_tokens=20_000, attention_cost=1e-3)

    plan = plan_step([*branched, *straight], rules)

    # by hand: 16 samples of 10 x 1,000 x (1 + 1), 4 of 10,000 x (1 + 10): two of the latter a rank
    assert plan.efficiency == 1.0
    assert [
        sorted(sample.path_lengths for one in mine for sample in one) for mine in plan.micro_batches
    ] == [[(1000,) * 10] * 8 + [(10_000,)] * 2] * 2
