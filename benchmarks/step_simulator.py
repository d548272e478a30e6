"""Simulates the train steps of a schedule in which moving data costs nothing: a discrete-event
calculation over the library's own rules.

Admission, reissue, submission, loading, the choice of a batch and expiry are the pure functions of
`relax_events.staleness`. Leases, the stand-ins' speeds, and a trainer that trains prompt groups one
after another as they come, are the simulator's. It knows nothing of micro-batches. Prompt groups
are leased to the engine with the most room for them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.profiles import Timing
from relax_events.config import RunConfig
from relax_events.events.parts import Outcome
from relax_events.staleness import (
    BatchSlot,
    IssuedGroup,
    OrderedSupply,
    ReadyGroup,
    ReadyGroups,
    ReadySupply,
    admitted_steps,
    choose_submissions,
    count_spare_leases,
    is_expired,
    may_load,
    may_submit,
)
from relax_events.staleness.updating import WeightUpdateMode
from relax_events.staleness.window import SampleOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The settings of the run file."""

    num_steps: int
    prompts_per_step: int
    max_staleness: int
    colocated: bool
    weight_update_mode: WeightUpdateMode
    sample_order: SampleOrder = "fifo"
    leases_per_engine: int
    """Prompt groups that an engine holds."""
    slots_per_engine: int
    leases_for_free_slots: bool = False
    """Whether engines hold more prompt groups while samples of running ones have ended."""
    batch_size: int = 1
    """Prompt groups that are leased at once."""
    lanes_per_engine: int | None = None
    """Batches that an engine holds, each until all of its prompt groups have ended; None for any."""

    @classmethod
    def from_config(cls, config: RunConfig, *, share_group_size: int | None = None) -> Schedule:
        """Read the settings from a resolved run file.

        Args:
            config: The run file.
            share_group_size: Members that the brokers allow a share group; None for a consumer
                group.
        """
        run = config.run
        return cls(
            num_steps=run.num_steps,
            prompts_per_step=run.prompts_per_step,
            max_staleness=run.max_staleness,
            colocated=config.devices.time_share,
            weight_update_mode=run.weight_update_mode,
            sample_order=run.sample_order,
            leases_per_engine=config.num_lanes,
            slots_per_engine=config.engine.max_running_samples,
            leases_for_free_slots=not config.engine.max_prompt_groups,
            **(
                {
                    "batch_size": config.prompt_groups_per_lease(),
                    "lanes_per_engine": config.plan_lanes(share_group_size).most,
                }
                if share_group_size is not None
                else {}
            ),
        )


@dataclass(slots=True)
class SimulatedLease:
    """A batch of prompt groups that one lane holds."""

    num_left: int


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A prompt group on its way."""

    issued: IssuedGroup
    lengths: Sequence[int]
    required_policy_version: int
    num_generations: int
    """Generations one after another for its batch slot, with its own."""
    lease: SimulatedLease
    num_left: int = 0
    policy_version: int = -1

    @property
    def train_step(self) -> int:
        """Step that it was issued for."""
        return self.issued.slot.train_step

    @property
    def group_index(self) -> int:
        """Position in the step's batch."""
        return self.issued.slot.group_index

    @property
    def samples_per_prompt(self) -> int:
        """Samples to generate."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(self.lengths)


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One engine: all its samples advance alike, `done` counts the tokens that each has got since
    the beginning.
    """

    waiting: list[SimulatedGroup] = field(default_factory=list)
    running: list[tuple[float, int, SimulatedGroup]] = field(default_factory=list)
    num_groups: int = 0
    """Prompt groups with unfinished samples."""
    num_leases: int = 0
    done: float = 0.0
    at: float = 0.0
    slot_seconds: float = 0.0
    version: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Results of a simulation.

    Attributes:
        published: When each policy version is published, in seconds; version 0 at 0.
        slot_use: Share of the engines' slots that generate, over the whole run.
        generations_in_series: By train step, the most generations one after another for one of its
            prompt groups.
        num_expired: Prompt groups that ended as expired.
        num_wasted_tokens: Tokens of prompt groups that were generated and not trained.
    """

    published: list[float]
    slot_use: float
    generations_in_series: list[int]
    num_expired: int
    num_wasted_tokens: int


class StepSimulator:
    """Runs the events of one schedule in order."""

    def __init__(
        self,
        timing: Timing,
        schedule: Schedule,
        lengths: Callable[[IssuedGroup], Sequence[int]],
        *,
        outcome: Callable[[IssuedGroup], Outcome] = lambda _: Outcome.TRAINED,
    ) -> None:
        """Prepare the engines.

        Args:
            timing: Speeds, in seconds.
            schedule: Settings.
            lengths: Returns the completion tokens of a prompt group's samples.
            outcome: Returns whether a generated prompt group can be trained; filtered and failed
                ones are replaced.
        """
        self._timing, self._schedule = timing, schedule
        self._lengths, self._outcome = lengths, outcome
        self._engines = [SimulatedEngine() for _ in range(timing.num_engines)]
        self._samples_per_prompt = len(lengths(IssuedGroup(BatchSlot(0, 0), 0, 0)))
        self._queue: deque[list[SimulatedGroup]] = deque()
        self._ready: dict[str, SimulatedGroup] = {}
        self._ready_groups = ReadyGroups(
            order=schedule.sample_order, prompts_per_step=schedule.prompts_per_step
        )
        self._in_order = schedule.sample_order == "fifo"
        supply = OrderedSupply if self._in_order else ReadySupply
        self._supply = supply(prompts_per_step=schedule.prompts_per_step, first_step=0)
        self._num_trained = self._version = 0
        self._taken: list[BatchSlot] = []
        self._trainer_busy = False
        self._forward_free = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = self._num_expired = self._num_wasted_tokens = 0
        self._now = 0.0
        self._published: list[float] = []
        self._generations = [0] * schedule.num_steps

    def run(self) -> SimulatedRun:
        """Run until the last version is published."""
        self._publish(0)
        while self._events and len(self._published) <= self._schedule.num_steps:
            self._now, _, event = heapq.heappop(self._events)
            event()
        num_slots = self._schedule.slots_per_engine * len(self._engines)
        slot_seconds = sum(engine.slot_seconds for engine in self._engines)
        return SimulatedRun(
            published=self._published,
            slot_use=slot_seconds / (num_slots * self._now),
            generations_in_series=self._generations,
            num_expired=self._num_expired,
            num_wasted_tokens=self._num_wasted_tokens,
        )

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._now + seconds, self._order, event))

    def _publish(self, version: int) -> None:
        schedule, self._version = self._schedule, version
        self._published.append(self._now)
        steps = admitted_steps(
            version, max_staleness=schedule.max_staleness, num_steps=schedule.num_steps
        )
        for slot in self._taken:
            self._supply.train(slot, trainer_version=version - 1)
        self._taken = []
        if self._in_order:
            self._drop_leftover(version)
        for step in range(self._supply.first_step, steps.stop):
            self._fill(step)
        for group in list(self._ready.values()):
            self._expire(group)
        for engine in self._engines:
            self._renew(engine)
        self._dispatch()
        self._train()

    def _fill(self, step: int) -> None:
        """Issue the prompt groups that an admitted step lacks."""
        slots = self._supply.find_empty_slots(step, uses_spares=True)
        self._issue([IssuedGroup(slot, 0, 0) for slot in slots], num_generations=1)

    def _drop_leftover(self, version: int) -> None:
        """End the prompt groups of trained steps that no engine has started."""
        for batch in self._queue:
            for group in batch:
                self._num_expired += group.train_step < version
            batch[:] = [group for group in batch if group.train_step >= version]
        for engine in self._engines:
            for group in [group for group in engine.waiting if group.train_step < version]:
                engine.waiting.remove(group)
                self._num_expired += 1
                self._end_lease(engine, group)

    def _end_lease(self, engine: SimulatedEngine, group: SimulatedGroup) -> None:
        group.lease.num_left -= 1
        engine.num_leases -= not group.lease.num_left

    def _issue(self, issued: Sequence[IssuedGroup], *, num_generations: int) -> None:
        size = self._schedule.batch_size
        for begin in range(0, len(issued), size):
            batch = issued[begin : begin + size]
            lease, groups = SimulatedLease(len(batch)), list[SimulatedGroup]()
            for one in batch:
                self._supply.add(one)
                required = max(one.slot.train_step - self._schedule.max_staleness, 0)
                if one.attempt:
                    required = max(required, self._version)
                groups.append(
                    SimulatedGroup(one, self._lengths(one), required, num_generations, lease)
                )
            self._queue.append(groups)

    def _renew(self, engine: SimulatedEngine) -> None:
        """Load the newest version if the engine may."""
        mode, num_running = self._schedule.weight_update_mode, len(engine.running)
        if engine.version == self._version or not may_load(mode, num_running=num_running):
            return
        self._advance(engine)
        engine.version = self._version
        engine.at = max(engine.at, self._now) + self._timing.load_seconds
        if mode == "recompute" and num_running:
            engine.at += self._timing.recompute_seconds
        self._await_completion(engine)

    def _dispatch(self) -> None:
        """Lease the queue's prompt groups to engines with room, and submit the leased ones."""
        while self._queue:
            engine = max(self._engines, key=self._count_room)
            if self._count_room(engine) <= 0:
                break
            engine.num_leases += 1
            engine.waiting += self._queue.popleft()
        for engine in self._engines:
            if engine.waiting:
                self._submit(engine)

    def _count_room(self, engine: SimulatedEngine) -> int:
        """Return how many more prompt groups an engine may lease; 0 if it has no free lane."""
        if engine.num_leases == self._schedule.lanes_per_engine:
            return 0
        num_free = self._schedule.leases_per_engine - len(engine.waiting) - engine.num_groups
        if not self._schedule.leases_for_free_slots:
            return num_free
        return num_free + count_spare_leases(
            num_groups=engine.num_groups,
            num_running=len(engine.running),
            samples_per_prompt=self._samples_per_prompt,
        )

    def _submit(self, engine: SimulatedEngine) -> None:
        schedule, num_running = self._schedule, len(engine.running)
        if not may_submit(
            schedule.weight_update_mode,
            published=self._version,
            loaded=engine.version,
            refused=-1,
        ):
            return
        chosen = choose_submissions(
            engine.waiting,
            loaded=engine.version,
            room=schedule.slots_per_engine - num_running,
            num_running=num_running,
        )
        for group in chosen:
            engine.waiting.remove(group)
            self._start(engine, group)

    def _start(self, engine: SimulatedEngine, group: SimulatedGroup) -> None:
        self._advance(engine)
        engine.num_groups += 1
        group.num_left, group.policy_version = len(group.lengths), engine.version
        for length in group.lengths:
            self._order += 1
            heapq.heappush(engine.running, (engine.done + length, self._order, group))
        self._await_completion(engine)

    def _advance(self, engine: SimulatedEngine) -> None:
        if self._now > engine.at:
            if engine.running:
                seconds, num_running = self._now - engine.at, len(engine.running)
                engine.done += seconds * self._timing.tokens_per_second(num_running)
                engine.slot_seconds += seconds * num_running
            engine.at = self._now

    def _await_completion(self, engine: SimulatedEngine) -> None:
        engine.epoch += 1
        if engine.running:
            epoch = engine.epoch
            seconds = (engine.running[0][0] - engine.done) / self._timing.tokens_per_second(
                len(engine.running)
            )
            self._after(
                max(engine.at - self._now, 0.0) + max(seconds, 0.0),
                lambda: self._complete(engine, epoch),
            )

    def _complete(self, engine: SimulatedEngine, epoch: int) -> None:
        if epoch != engine.epoch:
            return
        self._advance(engine)
        end, _, group = heapq.heappop(engine.running)
        engine.done = end
        group.num_left -= 1
        if not group.num_left:
            engine.num_groups -= 1
            self._end_lease(engine, group)
            self._forward(group)
        self._renew(engine)
        self._dispatch()
        self._await_completion(engine)

    def _forward(self, group: SimulatedGroup) -> None:
        """Pass through reference and actor-forward, which are equally fast, work side by side and
        serve in order of arrival.
        """
        self._forward_free = (
            max(self._forward_free, self._now)
            + group.num_tokens * self._timing.forward_token_seconds
        )
        self._after(self._forward_free - self._now, lambda: self._arrive(group))

    def _arrive(self, group: SimulatedGroup) -> None:
        outcome = self._outcome(group.issued)
        if outcome is not Outcome.TRAINED:
            self._end(group, outcome)
        elif not self._expire(group):
            self._ready[group.issued.prompt_group_id] = group
            self._ready_groups.apply([_ready_group(group)], removed=())
            self._train()

    def _expire(self, group: SimulatedGroup) -> bool:
        """End a prompt group that is too stale; return whether it is."""
        expired = is_expired(
            group.policy_version,
            trainer_version=self._version,
            max_staleness=self._schedule.max_staleness,
        ) or (self._in_order and group.train_step < self._version)
        if expired:
            group_id = group.issued.prompt_group_id
            self._ready.pop(group_id, None)
            self._ready_groups.apply((), removed=[group_id])
            self._num_expired += 1
            self._end(group, Outcome.EXPIRED)
        return expired

    def _end(self, group: SimulatedGroup, outcome: Outcome) -> None:
        """Count an untrained prompt group, and issue its batch slot again."""
        self._num_wasted_tokens += group.num_tokens
        issued, num_generations = group.issued, group.num_generations + 1
        if self._in_order:
            self._ready_groups.apply((), (), [(group.train_step, group.group_index)])
            if group.train_step < self._version:
                return
        self._supply.end(issued, outcome)
        replacements = self._supply.find_replacements(issued, outcome, uses_spares=True)
        again = [IssuedGroup(slot, attempt, 0) for slot, attempt in replacements]
        self._issue(again, num_generations=num_generations)
        self._dispatch()
        self._train()

    def _train(self) -> None:
        """Start on the next prompt group of the step, as soon as there is one; colocated, only when
        all are there.
        """
        schedule, version = self._schedule, self._version
        num_needed = schedule.prompts_per_step - self._num_trained if schedule.colocated else 1
        if self._trainer_busy or self._ready_groups.count_eligible(version) < num_needed:
            return
        (chosen,) = self._ready_groups.take(1, trainer_version=version)
        seconds = self._timing.to_train_seconds if self._num_trained == 0 else 0.0
        group = self._ready.pop(chosen.prompt_group_id)
        self._taken.append(group.issued.slot)
        self._generations[self._version] = max(
            self._generations[self._version], group.num_generations
        )
        self._trainer_busy = True
        self._after(seconds + group.num_tokens * self._timing.train_token_seconds, self._trained)

    def _trained(self) -> None:
        self._num_trained += 1
        if self._num_trained < self._schedule.prompts_per_step:
            self._trainer_busy = False
            self._train()
            return
        self._num_trained = 0
        self._after(self._timing.update_seconds, self._updated)

    def _updated(self) -> None:
        self._trainer_busy = False
        self._publish(self._version + 1)


def _ready_group(group: SimulatedGroup) -> ReadyGroup:
    issued = group.issued
    return ReadyGroup(
        group.train_step,
        group.group_index,
        issued.attempt,
        group.policy_version,
        issued.prompt_group_id,
    )


def repeat_lengths(
    steps: Sequence[Sequence[Sequence[int]]],
) -> Callable[[IssuedGroup], Sequence[int]]:
    """Return the lengths of a prompt group by train step and batch slot, the same at each attempt;
    spares repeat them.
    """

    def look_up(group: IssuedGroup) -> Sequence[int]:
        slot: BatchSlot = group.slot
        groups = steps[slot.train_step]
        return groups[slot.group_index % len(groups)]

    return look_up
