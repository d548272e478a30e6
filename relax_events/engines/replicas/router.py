"""Several engines that are one: prompt groups are spread over them, and what a lost engine had goes
on in another one.

    worker   submit --> the prompt group's first engine that serves and has room --+
                               ^                                                   |--> ended: poll gives it
                               +-- with the tokens so far -- lost, refused weights -+

A prompt group is computed in one engine, all its samples and all turns of its talks, so that its
prefix is computed once. Every engine that serves has the version that the router has; one that
comes, or comes back, loads it first. An engine that loses its server is opened anew while the
others go on; when none is left, samples wait.
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Literal

import structlog

from relax_events.engines.protocol import Engine, EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.replicas.inflight import Journey, Journeys
from relax_events.engines.replicas.policies import (
    GRACE_SECONDS,
    most_samples,
    preferred,
    refusal,
    wait_for_most,
)
from relax_events.engines.replicas.replica import (
    Altered,
    Broke,
    Came,
    Ended,
    Event,
    Loaded,
    Lost,
    Member,
    Standing,
    added,
)
from relax_events.errors import ConfigError, EngineFailed, PoisonSample, RelaxError, WeightsError
from relax_events.events.parts import FinishReason
from relax_events.telemetry.component_metrics import RoutingMetrics
from relax_events.weights import Weights

log = structlog.get_logger()
MOST_BARREN_LOSSES = 3
"""Losses of every engine, one after the other, without a sample in between, that a router bears."""
REMEMBERED_GROUPS = 8192
"""Prompt groups whose engine is known: between two turns of a talk an engine has nothing of it."""
OnRunning = Literal["swap", "restart"]


class Router:
    """Implements `Engine` over others, each of which a thread of its own uses; see the module's
    docstring.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[], Engine]], *, policy_version: int = 0
    ) -> None:
        """Open all engines at once, and wait for the fastest and those that are hardly slower.

        Args:
            makers: Each opens an engine with the weights of the model's folder; their names decide
                which prompt group goes where.
            policy_version: Of the weights in the folder.
        Raises:
            ConfigError: What an engine says of its settings.
            EnvironmentProblem, EngineFailed: Of the first engine, when none came up.
        """
        self.policy_version = policy_version
        self._metrics: RoutingMetrics | None = None
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._journeys = Journeys()
        self._finished: list[GeneratedSample] = []
        self._places: OrderedDict[str, Member] = OrderedDict()
        self._weights: Weights | None = None
        self._is_asleep = self._is_interrupted = self._is_without_engines = False
        self._failure: BaseException | None = None
        self._members = [Member(name, make, tell=self._events.put) for name, make in makers.items()]
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._await_first()
            on_failure.pop_all()

    @property
    def num_running(self) -> int:
        """Samples submitted and not given back."""
        return len(self._journeys) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens that all engines have drawn so far."""
        return self.usage.num_drawn

    @property
    def usage(self) -> EngineUsage:
        """What all engines do; samples that have none wait."""
        waiting = EngineUsage(num_waiting=self._journeys.num_waiting)
        return added([waiting, *(member.usage for member in self._members)])

    def report_to(self, metrics: RoutingMetrics) -> None:
        """Count into a worker's metrics from now on."""
        self._metrics = metrics
        self._note_standing()

    def submit(self, request: GenerationRequest) -> None:
        """Hand a prompt group's samples to its engine; without one that serves they wait, and what
        is wrong with them is said later.

        Raises:
            PoisonSample: As `Engine`; nothing is queued.
            EngineFailed: All engines are lost for good.
        """
        self._take_events()
        self._require_engines()
        journeys = [Journey(request, sample) for sample in request.samples]
        self._journeys.add(journeys)
        try:
            self._place(request, journeys)
        except PoisonSample:
            self._journeys.end_waiting(journeys, FinishReason.ERROR)
            raise

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Give the samples that ended in any engine, waiting for the first.

        Raises:
            EngineFailed: All engines are lost for good.
        """
        deadline = time.monotonic() + timeout_seconds
        self._take_events()
        while (
            not self._finished
            and self._journeys
            and not self._is_asleep
            and not self._is_interrupted
            and self._failure is None
        ):
            if not self._take_events(wait_seconds=max(0.0, deadline - time.monotonic())):
                break
        self._is_interrupted = False
        finished, self._finished = self._finished, []
        if not finished:
            self._require_engines()
        return finished

    def interrupt(self) -> None:
        """Let a poll that waits return, from any thread."""
        self._events.put(None)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Take samples out, all of them without `sample_ids`, with the tokens that their engines
        had; see `Engine`.
        """
        self._take_events()
        aborted: list[GeneratedSample] = []
        for member, journeys in self._journeys.by_member(sample_ids).items():
            if member is not None:
                with suppress(EngineFailed):
                    aborted += self._journeys.end(
                        member.abort([journey.sample.sample_id for journey in journeys]), member
                    )
        self._take_events(places=False)
        aborted += self._journeys.end_waiting(
            self._journeys.by_member(sample_ids).get(None, []), FinishReason.ABORT
        )
        self._place_waiting()
        return aborted

    def load_weights(self, weights: Weights, *, on_running: OnRunning = "restart") -> None:
        """Have all engines go over to another version, each while the others generate; one that
        refuses what another takes is opened anew.

        Raises:
            WeightsError: No engine took them; the old version keeps serving.
            EngineFailed: All engines are lost for good.
        """
        self._take_events()
        self._require_engines()
        ready = [
            member
            for member in self._members
            if member.standing in (Standing.SERVING, Standing.IDLE)
        ]
        loads = {member.load(weights, on_running=on_running): member for member in ready}
        if not loads:
            raise WeightsError(
                f"policy version {weights.policy_version} is not served: no engine is there "
                "to load it; try again later"
            )
        late = wait_for_most(loads)
        errors = {
            member: future.exception() for future, member in loads.items() if future not in late
        }
        if None not in errors.values():
            raise refusal(weights.policy_version, list(errors.values()))
        self._weights, self.policy_version, self._is_asleep = weights, weights.policy_version, False
        for future, member in loads.items():
            if future in late:
                log.warning(
                    "engine.late", engine=member.name, policy_version=weights.policy_version
                )
                self._join_when_loaded(member, weights, future)
            elif (error := errors[member]) is None:
                self._serve(member)
            else:
                member.standing = Standing.LOADING
                member.give_up(f"it did not take policy version {weights.policy_version}: {error}")
        self._place_waiting()

    def sleep(self) -> None:
        """Have all engines give their memory back; what runs waits."""
        self._take_events()
        self._is_asleep = True
        wait([member.sleep() for member in self._serving])

    def wake(self) -> None:
        """Have all engines take their memory again."""
        self._is_asleep = False
        wait([member.wake() for member in self._serving])
        self._take_events()

    def close(self) -> None:
        """End all engines; samples that still run are dropped."""
        for member in self._members:
            member.close()
        for member in self._members:
            member.join()

    @property
    def _serving(self) -> list[Member]:
        return [member for member in self._members if member.standing is Standing.SERVING]

    def _await_first(self) -> None:
        """Wait until an engine serves, and a little for the others; raise what keeps all of them
        from it, or says that the settings are wrong.
        """
        started, deadline = time.monotonic(), float("inf")
        errors: dict[Member, RelaxError] = {}
        while len(errors) + len(self._serving) < len(self._members):
            left = deadline - time.monotonic()
            try:
                event = (
                    self._events.get(timeout=max(0.0, left))
                    if left < float("inf")
                    else self._events.get()
                )
            except queue.Empty:
                break
            if isinstance(event, Lost):
                errors.setdefault(event.member, event.error)
                if isinstance(event.error, ConfigError):
                    raise event.error
            self._handle(event)
            self._require_engines()
            if self._serving and deadline == float("inf"):
                deadline = time.monotonic() + (time.monotonic() - started) + GRACE_SECONDS
        if not self._serving:
            raise next(iter(errors.values()))

    def _require_engines(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take_events(self, *, wait_seconds: float = 0.0, places: bool = True) -> bool:
        """Handle what the engines have told, waiting for the first of it; return whether there was
        anything.

        Args:
            wait_seconds: At most.
            places: Whether samples that wait are handed to engines that are free for them.
        """
        try:
            event = (
                self._events.get(timeout=wait_seconds)
                if wait_seconds
                else self._events.get_nowait()
            )
        except queue.Empty:
            return False
        with suppress(queue.Empty):
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        if places:
            self._place_waiting()
        return True

    def _handle(self, event: Event | None) -> None:
        match event:
            case None:
                self._is_interrupted = True
            case Came(member):
                self._catch_up(member)
            case Loaded(member, policy_version, None):
                if policy_version == self.policy_version:
                    self._serve(member)
                else:
                    self._catch_up(member)
            case Loaded(member, policy_version, Altered()):
                log.info("engine.idle", engine=member.name, policy_version=policy_version)
                member.standing = Standing.IDLE
            case Loaded(member, policy_version, error):
                member.give_up(f"it did not take policy version {policy_version}: {error}")
            case Ended(member, samples):
                self._finished += self._journeys.end(samples, member)
            case Lost(member, error, samples):
                self._lose(member, error, samples)
            case Broke(error):
                self._failure = error

    def _catch_up(self, member: Member) -> None:
        """Have an engine load what the router serves, before it serves itself."""
        if (weights := self._weights) is None:
            self._serve(member)
        else:
            self._join_when_loaded(member, weights, member.load(weights, on_running="restart"))

    def _join_when_loaded(self, member: Member, weights: Weights, load: Future[None]) -> None:
        member.standing = Standing.LOADING
        self._note_standing()
        proof = member.prove(weights, load)
        proof.add_done_callback(
            lambda done: self._events.put(Loaded(member, weights.policy_version, done.exception()))
        )

    def _serve(self, member: Member) -> None:
        if self._is_asleep:
            member.sleep()
        if member.circuit.is_half_open and member.standing is not Standing.SERVING:
            log.info("engine.returned", engine=member.name, policy_version=self.policy_version)
        member.standing = Standing.SERVING
        self._is_without_engines = False
        self._note_standing()

    def _lose(self, member: Member, error: RelaxError, samples: list[GeneratedSample]) -> None:
        """Let the samples of an engine wait for another one."""
        member.standing = Standing.LOST
        num_samples = self._journeys.take_from(member, samples)
        log.error(
            "engine.lost",
            engine=member.name,
            policy_version=self.policy_version,
            num_samples=num_samples,
            reason=str(error),
        )
        if self._metrics is not None:
            self._metrics.lost(num_samples)
        self._note_standing()
        if all(one.circuit.num_barren > MOST_BARREN_LOSSES for one in self._members):
            times = f"{MOST_BARREN_LOSSES + 1} times without a sample in between"
            self._failure = EngineFailed(
                f"every engine was lost {times}; the last one, {member.name}: {error}"
            )

    def _place_waiting(self) -> None:
        """Hand samples to engines that have no engine any more, or never had one."""
        for request, journeys in self._journeys.waiting():
            try:
                self._place(request, journeys)
            except PoisonSample as error:
                self._finished += self._journeys.end_waiting(
                    journeys, FinishReason.ERROR, error=str(error)
                )

    def _place(self, request: GenerationRequest, journeys: list[Journey]) -> None:
        """Hand samples of a prompt group to the first of its engines that takes them; to none,
        where none does.

        Raises:
            PoisonSample: The request can't be generated.
        """
        key, samples = request.prompt_group_id, tuple(journey.sample for journey in journeys)
        for member in self._choices(key, len(samples)):
            with suppress(EngineFailed):  # of which we are told by and by
                member.submit(replace(request, samples=samples))
                self._journeys.give(journeys, member)
                self._places[key] = member
                self._places.move_to_end(key)
                if len(self._places) > REMEMBERED_GROUPS:
                    self._places.popitem(last=False)
                return

    def _choices(self, key: str, num_new: int) -> list[Member]:
        """Order the engines that may take samples of a prompt group: the one that had some; those
        with room by its order; the least busy.
        """
        serving = {
            member.name: member
            for member in self._serving
            if not (member.circuit.is_half_open and member.num_samples)
        }
        if not serving:
            self._say_that_none_serves()
            return []
        num_samples = sum(member.num_samples for member in serving.values())
        most = most_samples(num_samples, num_new=num_new, num_engines=len(serving))
        order = [serving[name] for name in preferred(key, serving)]
        rest = sorted(order, key=lambda member: member.num_samples)
        has_room = [member for member in order if member.num_samples + num_new <= most]
        known = [member for member in order if member is self._places.get(key)]
        return list(dict.fromkeys([*known, *has_room, *rest]))

    def _say_that_none_serves(self) -> None:
        if not self._serving and not self._is_without_engines:
            self._is_without_engines = True
            log.warning(
                "engines.awaited", num_samples=len(self._journeys), num_engines=len(self._members)
            )

    def _note_standing(self) -> None:
        if self._metrics is not None:
            num_serving = len(self._serving)
            self._metrics.engines(serving=num_serving, away=len(self._members) - num_serving)
