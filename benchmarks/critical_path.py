"""The shortest time in which a schedule can run: a discrete-event calculation in which moving data
costs nothing.

It knows the rules (admission by staleness, lanes, what an engine does with a new version, steps in
order, training as prompt groups come) and the stand-ins' speeds, and nothing of the pipeline: no
bus, no records, no micro-batches. Each prompt group goes to the engine with the fewest running
samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.profiles import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The settings of the run file."""

    num_steps: int
    max_staleness: int
    colocated: bool
    weight_update_mode: Literal["drain", "in_flight"]
    lanes_per_engine: int


@dataclass(slots=True, eq=False)
class Group:
    """A prompt group: its step, its batch slot, the tokens of its samples."""

    train_step: int
    index: int
    lengths: Sequence[int]
    num_left: int = 0


@dataclass(slots=True, eq=False)
class EnginePath:
    """One engine: all its samples advance alike, `done` counts the tokens that each has got since
    the beginning."""

    running: list[tuple[float, int, Group]] = field(default_factory=list)
    done: float = 0.0
    at: float = 0.0
    free_lanes: int = 0
    version: int = 0
    loading_until: float = 0.0
    epoch: int = 0


class CriticalPath:
    """Runs the events of one schedule in order."""

    def __init__(
        self, timing: Timing, schedule: Schedule, steps: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Set the stage.

        Args:
            timing: Speeds, in the paper's seconds.
            schedule: Rules.
            steps: Completion tokens by train step, prompt group and sample.
        """
        self._timing, self._schedule = timing, schedule
        self._steps = [
            [Group(step, index, lengths) for index, lengths in enumerate(groups)]
            for step, groups in enumerate(steps)
        ]
        self._engines = [
            EnginePath(free_lanes=schedule.lanes_per_engine) for _ in range(timing.num_engines)
        ]
        self._queue: list[Group] = []
        self._ready: list[tuple[int, int, Group]] = []
        self._num_trained = self._version = self._num_issued = 0
        self._trainer_busy = False
        self._forward_free = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0.0
        self.published: list[float] = []

    def run(self) -> list[float]:
        """Return when each policy version is published, from version 0 at 0."""
        self._publish(0)
        while self._events and len(self.published) <= self._schedule.num_steps:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.published

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._now + seconds, self._order, event))

    def _publish(self, version: int) -> None:
        self._version = version
        self.published.append(self._now)
        admitted = min(version + self._schedule.max_staleness + 1, self._schedule.num_steps)
        for step in range(self._num_issued, admitted):
            self._queue += self._steps[step]
        self._num_issued = max(self._num_issued, admitted)
        for engine in self._engines:
            self._renew(engine)
        self._dispatch()
        self._train()

    def _renew(self, engine: EnginePath) -> None:
        """Load the newest version if it is this engine's time to."""
        if engine.version == self._version or (
            self._schedule.weight_update_mode == "drain" and engine.running
        ):
            return
        self._advance(engine)
        engine.version, engine.loading_until = self._version, self._now + self._timing.load_seconds
        engine.at = engine.loading_until
        self._await_completion(engine)

    def _dispatch(self) -> None:
        """Give waiting prompt groups, oldest first, to the engines with lanes left."""
        while self._queue:
            group = self._queue[0]
            oldest = group.train_step - self._schedule.max_staleness
            fit = [
                engine
                for engine in self._engines
                if engine.free_lanes and engine.version >= oldest and not self._must_finish(engine)
            ]
            if not fit:
                return
            self._queue.pop(0)
            self._start(min(fit, key=lambda engine: len(engine.running)), group)

    def _must_finish(self, engine: EnginePath) -> bool:
        return self._schedule.weight_update_mode == "drain" and engine.version < self._version

    def _start(self, engine: EnginePath, group: Group) -> None:
        self._advance(engine)
        engine.free_lanes -= 1
        group.num_left = len(group.lengths)
        for length in group.lengths:
            self._order += 1
            heapq.heappush(engine.running, (engine.done + length, self._order, group))
        self._await_completion(engine)

    def _advance(self, engine: EnginePath) -> None:
        if self._now > engine.at:
            if engine.running:
                engine.done += (self._now - engine.at) * self._timing.tokens_per_second(
                    len(engine.running)
                )
            engine.at = self._now

    def _await_completion(self, engine: EnginePath) -> None:
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

    def _complete(self, engine: EnginePath, epoch: int) -> None:
        if epoch != engine.epoch:
            return
        self._advance(engine)
        end, _, group = heapq.heappop(engine.running)
        engine.done = end
        group.num_left -= 1
        if not group.num_left:
            engine.free_lanes += 1
            self._forward(group)
            self._renew(engine)
            self._dispatch()
        self._await_completion(engine)

    def _forward(self, group: Group) -> None:
        """Pass through reference and actor-forward, which are equally fast, work side by side and
        serve in order of arrival."""
        self._forward_free = (
            max(self._forward_free, self._now)
            + sum(group.lengths) * self._timing.forward_token_seconds
        )
        self._after(self._forward_free - self._now, lambda: self._arrive(group))

    def _arrive(self, group: Group) -> None:
        heapq.heappush(self._ready, (group.train_step, group.index, group))
        self._train()

    def _train(self) -> None:
        """Start on the next prompt group of the step, as soon as there is one; colocated, only when
        all are there."""
        prompts_per_step = len(self._steps[0])
        if self._trainer_busy or not self._ready or self._ready[0][0] > self._version:
            return
        if (
            self._schedule.colocated
            and not self._num_trained
            and len(self._ready) < prompts_per_step
        ):
            return
        seconds = self._timing.to_train_seconds if self._num_trained == 0 else 0.0
        group = heapq.heappop(self._ready)[2]
        self._trainer_busy = True
        self._after(seconds + sum(group.lengths) * self._timing.train_token_seconds, self._trained)

    def _trained(self) -> None:
        self._num_trained += 1
        if self._num_trained < len(self._steps[0]):
            self._trainer_busy = False
            self._train()
            return
        self._num_trained = 0
        self._after(self._timing.update_seconds, self._updated)

    def _updated(self) -> None:
        self._trainer_busy = False
        self._publish(self._version + 1)
