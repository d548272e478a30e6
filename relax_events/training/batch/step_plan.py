"""Plans a train step over data-parallel ranks: which rank trains which samples, in which
micro-batch. Pure functions of lengths.

    lengths of all prompt groups ──▶ rounds, most expensive samples first: a micro-batch for each
    rank ──▶ ranks of nearly equal cost, with equally many micro-batches

Where a forward pass is collective, ranks wait for each other in every round, and so each round is
balanced; otherwise the whole step is. Every rank computes the plan from the same lengths, and gets
the same one: it depends neither on the rank that computes it nor on the order in which prompt
groups arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace

BALANCED = 0.96
"""Efficiency from which prompt groups are split no further."""
SPLITS = (1, 2, 4, 8, 0)
"""Samples of a prompt group stay together up to this fraction of a micro-batch's budget, 0 for
single samples. Each is tried until the ranks are balanced: together they may share their prompt."""
SEARCH_STEPS = 10


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A prompt group and, for each of its samples in order, the tokens of each path."""

    prompt_group_id: str
    lengths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample of the step: `index` counts the samples of its prompt group, and it has
    `path_lengths` tokens.
    """

    prompt_group_id: str
    index: int
    path_lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of all paths."""
        return sum(self.path_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What a plan must keep to.

    Attributes:
        num_ranks: Data-parallel ranks.
        max_tokens: Budget of a micro-batch; a longer sample is one of its own, of several passes.
        attention_cost: Cost of a pair of tokens in attention, relative to that of a token in all
            matrices.
        whole_prompt_groups: Keep all samples of a prompt group in one micro-batch.
        waits_each_round: Ranks wait for each other in every round, and not only at the step's end.
    """

    num_ranks: int
    max_tokens: int
    attention_cost: float = 0.0
    whole_prompt_groups: bool = False
    waits_each_round: bool = False

    def cost(self, sample: PlannedSample) -> float:
        """Return the cost of a sample, in tokens of a model without attention; tokens attend to
        those of their own path.
        """
        return sum(length * (1 + self.attention_cost * length) for length in sample.path_lengths)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The samples of each micro-batch of each rank. All ranks have equally many micro-batches, some
    of which may be empty.

    Attributes:
        micro_batches: By rank, then by round.
        efficiency: Mean of the ranks' costs, divided by the greatest; where they wait for each
            other in every round, by the sum of the greatest of each round.
    """

    micro_batches: list[list[list[PlannedSample]]]
    efficiency: float

    def ranks_by_sample(self) -> dict[tuple[str, int], int]:
        """Return the rank of each sample, by prompt group and index."""
        return {
            (sample.prompt_group_id, sample.index): rank
            for rank, micro_batches in enumerate(self.micro_batches)
            for micro_batch in micro_batches
            for sample in micro_batch
        }


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that stay together: a prompt group, a part of one, or a single sample."""

    cost: float
    num_tokens: int
    samples: tuple[PlannedSample, ...]


@dataclass(slots=True)
class _MicroBatch:
    cost: float
    num_tokens: int
    samples: list[PlannedSample]


_Round = list[_MicroBatch]


def plan_step(groups: Iterable[GroupSize], rules: PlanRules) -> StepPlan:
    """Return which rank trains which samples in which micro-batch.

    Samples of a prompt group stay together where the ranks are balanced so; otherwise prompt groups
    are split, down to single samples, unless the rules forbid it.

    Args:
        groups: With distinct ids, in any order.
        rules: See there.
    """
    samples = [
        [
            PlannedSample(group.prompt_group_id, index, path_lengths)
            for index, path_lengths in enumerate(group.lengths)
        ]
        for group in sorted(groups, key=lambda group: group.prompt_group_id)
    ]
    best: StepPlan | None = None
    for split in SPLITS[:1] if rules.whole_prompt_groups else SPLITS:
        units = [unit for members in samples for unit in _units(members, rules, split=split)]
        plan = _deal(_fill_evenly(_most_expensive_first(units), rules), rules)
        if best is None or plan.efficiency > best.efficiency:
            best = plan
        if best.efficiency >= BALANCED:
            break
    return best or StepPlan([[] for _ in range(rules.num_ranks)], 1.0)


def _units(members: Sequence[PlannedSample], rules: PlanRules, *, split: int) -> list[_Unit]:
    """Return a prompt group as units of at most a fraction of the budget, or of one sample."""
    bound = rules.max_tokens // split if split else 0
    units: list[list[PlannedSample]] = []
    num_tokens = 0
    for sample in members:
        if units and (rules.whole_prompt_groups or num_tokens + sample.length <= bound):
            units[-1].append(sample)
            num_tokens += sample.length
        else:
            units.append([sample])
            num_tokens = sample.length
    return [
        _Unit(
            sum(rules.cost(sample) for sample in unit),
            sum(sample.length for sample in unit),
            tuple(unit),
        )
        for unit in units
    ]


def _most_expensive_first(units: Iterable[_Unit]) -> list[_Unit]:
    """Order units by cost: micro-batches of similar lengths need least padding, and the last round,
    of short samples, evens the ranks out.
    """
    return sorted(
        units,
        key=lambda unit: (-unit.cost, unit.samples[0].prompt_group_id, unit.samples[0].index),
    )


def _fill_evenly(units: Sequence[_Unit], rules: PlanRules) -> list[_Round]:
    """Return as few rounds as the budget allows, each filled as little as that number allows: so
    the last one is filled like the others.
    """
    best = _fill(units, rules, max_tokens=rules.max_tokens)
    low, high = 0, rules.max_tokens
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        rounds = _fill(units, rules, max_tokens=middle)
        if len(rounds) <= len(best):
            best, high = rounds, middle
        else:
            low = middle
    return best


def _fill(units: Sequence[_Unit], rules: PlanRules, *, max_tokens: int) -> list[_Round]:
    """Give each unit to the micro-batch of the round, or its rank, with the least cost; where it
    does not fit there, begin the next round. A unit above the budget gets a micro-batch of its own.
    """
    rounds: list[_Round] = []
    costs: list[tuple[float, int]] = []
    for unit in units:
        cheapest = rounds[-1][costs[0][1]] if rounds else None
        if cheapest is None or (
            cheapest.samples and cheapest.num_tokens + unit.num_tokens > max_tokens
        ):
            rounds.append([_MicroBatch(0.0, 0, []) for _ in range(rules.num_ranks)])
            if rules.waits_each_round or not costs:
                costs = [(0.0, index) for index in range(rules.num_ranks)]
            cheapest = rounds[-1][costs[0][1]]
        cheapest.cost += unit.cost
        cheapest.num_tokens += unit.num_tokens
        cheapest.samples += unit.samples
        least, index = costs[0]
        heapreplace(costs, (least + unit.cost, index))
    return rounds


def _deal(rounds: Sequence[_Round], rules: PlanRules) -> StepPlan:
    """Give the micro-batches of each round to the ranks: where each round was balanced alone, the
    most expensive one to the rank with the least cost so far.
    """
    costs = [0.0] * rules.num_ranks
    dealt: list[list[list[PlannedSample]]] = [[] for _ in costs]
    for micro_batches in rounds:
        ordered, ranks = list(micro_batches), list(range(rules.num_ranks))
        if rules.waits_each_round:
            ordered.sort(key=lambda one: -one.cost)
            ranks.sort(key=lambda rank: (costs[rank], rank))
        for rank, micro_batch in zip(ranks, ordered, strict=True):
            dealt[rank].append(micro_batch.samples)
            costs[rank] += micro_batch.cost
    greatest = (
        sum(max(one.cost for one in micro_batches) for micro_batches in rounds)
        if rules.waits_each_round
        else max(costs)
    )
    return StepPlan(dealt, sum(costs) / len(costs) / greatest if greatest else 1.0)
