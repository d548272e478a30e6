"""Route prompt groups over several engines, and continue the samples of a lost engine in another
one.

    worker   submit --> the prompt group's first serving engine with room --+--> finished --> poll
                               ^                                            |
                               +-- the tokens so far -- lost, rejected -----+

One engine computes all samples and turns of a prompt group, so their prefix is computed once. All
serving engines have the router's policy version; an engine that opens or recovers loads it first.
An engine that loses its server is reopened while the others continue; if none is left, samples
wait.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Literal

import structlog

from relax_events.engines.protocol import Engine, EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.replicas.inflight import InflightSample, InflightSamples
from relax_events.engines.replicas.placement import PromptGroupPlacement
from relax_events.engines.replicas.policies import GRACE_SECONDS, choose_error, wait_for_most
from relax_events.engines.replicas.replica import (
    Replica,
    ReplicaCrashed,
    ReplicaEvent,
    ReplicaLost,
    ReplicaOpened,
    ReplicaState,
    SamplesFinished,
    WeightsLoaded,
    WeightsOverwritten,
    sum_usage,
)
from relax_events.errors import ConfigError, EngineFailed, PoisonSample, RelaxError, WeightsError
from relax_events.events.parts import FinishReason
from relax_events.telemetry.component_metrics import ReplicaMetrics
from relax_events.weights import Weights

log = structlog.get_logger()
MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive failures of every engine, without a finished sample in between, after which the
router fails.
"""
OnRunning = Literal["swap", "restart"]


class Router:
    """Implements `Engine` over replicas, each with a thread of its own; see the module's
    docstring.
    """

    def __init__(
        self, factories: Mapping[str, Callable[[], Engine]], *, policy_version: int = 0
    ) -> None:
        """Open all engines at once; wait for the fastest, and `GRACE_SECONDS` more than its time
        for the others.

        Args:
            factories: Each opens an engine with the weights of the model's folder; their names
                decide which engine a prompt group prefers.
            policy_version: Version of the weights in the folder.
        Raises:
            ConfigError: An engine rejects its settings.
            EnvironmentProblem, EngineFailed: No engine started; this is the first one's error.
        """
        self.policy_version = policy_version
        self.frees_memory = False
        """Whether engines free their memory in their sleep for others, so none is opened then."""
        self._metrics: ReplicaMetrics | None = None
        self._events: queue.SimpleQueue[ReplicaEvent | None] = queue.SimpleQueue()
        self._inflight = InflightSamples()
        self._finished: list[GeneratedSample] = []
        self._placement = PromptGroupPlacement()
        self._weights: Weights | None = None
        self._is_asleep = self._is_interrupted = self._is_without_engines = False
        self._failure: BaseException | None = None
        self._replicas = [
            Replica(name, open_engine, on_event=self._events.put)
            for name, open_engine in factories.items()
        ]
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._wait_for_first()
            on_failure.pop_all()

    @property
    def num_running(self) -> int:
        """Samples submitted and not returned."""
        return len(self._inflight) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens that all engines have sampled so far."""
        return self.usage.num_generated

    @property
    def usage(self) -> EngineUsage:
        """Usage of all engines; samples without an engine count as waiting."""
        waiting = EngineUsage(num_waiting=self._inflight.num_waiting)
        return sum_usage([waiting, *(replica.usage for replica in self._replicas)])

    def set_metrics(self, metrics: ReplicaMetrics) -> None:
        """Report to a worker's metrics from now on."""
        self._metrics = metrics
        self._update_metrics()

    def submit(self, request: GenerationRequest) -> None:
        """Submit a prompt group's samples to its engine; if none serves, they wait and are checked
        later.

        Raises:
            PoisonSample: As `Engine`; nothing is queued.
            EngineFailed: All engines are permanently lost.
        """
        self._handle_events()
        self._require_engines()
        entries = [InflightSample(request, sample) for sample in request.samples]
        self._inflight.add(entries)
        try:
            self._assign(request, entries)
        except PoisonSample:
            self._inflight.finish_waiting(entries, FinishReason.ERROR)
            raise

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the samples that finished in any engine, waiting for the first.

        Raises:
            EngineFailed: All engines are lost for good.
        """
        deadline = time.monotonic() + timeout_seconds
        self._handle_events()
        while (
            not self._finished
            and self._inflight
            and not self._is_asleep
            and not self._is_interrupted
            and self._failure is None
        ):
            if not self._handle_events(wait_seconds=max(0.0, deadline - time.monotonic())):
                break
        self._is_interrupted = False
        finished, self._finished = self._finished, []
        if not finished:
            self._require_engines()
        return finished

    def interrupt(self) -> None:
        """Make a waiting poll return, from any thread."""
        self._events.put(None)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all of them without `sample_ids`, with their tokens so far;
        see `Engine`.
        """
        self._handle_events()
        aborted: list[GeneratedSample] = []
        for replica, entries in self._inflight.by_replica(sample_ids).items():
            if replica is not None:
                with suppress(EngineFailed):
                    aborted += self._inflight.finish(
                        replica.abort([entry.sample.sample_id for entry in entries]), replica
                    )
        self._handle_events(assigns=False)
        aborted += self._inflight.finish_waiting(
            self._inflight.by_replica(sample_ids).get(None, []), FinishReason.ABORT
        )
        self._assign_waiting()
        return aborted

    def load_weights(self, weights: Weights, *, on_running: OnRunning = "restart") -> None:
        """Load another version into all engines, each while the others generate. An engine that
        rejects a version that another loads is reopened.

        Raises:
            WeightsError: No engine loaded them; the old version keeps serving.
            EngineFailed: All engines are lost for good.
        """
        self._allow_opening()
        self._handle_events()
        self._require_engines()
        ready = [
            replica
            for replica in self._replicas
            if replica.state in (ReplicaState.SERVING, ReplicaState.IDLE)
        ]
        loads = {replica.load(weights, on_running=on_running): replica for replica in ready}
        if not loads:
            raise WeightsError(
                f"policy version {weights.policy_version} is not served: no engine is available "
                "to load it; try again later"
            )
        late = wait_for_most(loads)
        errors = {
            replica: future.exception() for future, replica in loads.items() if future not in late
        }
        if None not in errors.values():
            raise choose_error(weights.policy_version, list(errors.values()))
        self._weights, self.policy_version, self._is_asleep = weights, weights.policy_version, False
        for future, replica in loads.items():
            if future in late:
                log.warning(
                    "engine.load_delayed",
                    engine=replica.name,
                    policy_version=weights.policy_version,
                )
                self._serve_when_loaded(replica, weights, future)
            elif (error := errors[replica]) is None:
                self._serve(replica)
            else:
                replica.state = ReplicaState.LOADING
                replica.recycle(f"it did not load policy version {weights.policy_version}: {error}")
        self._assign_waiting()

    def sleep(self) -> None:
        """Let all engines release their memory; running samples wait. Engines that `frees_memory`
        have freed it afterwards, an engine that was being opened too; a lost one is not reopened.
        """
        self._handle_events()
        self._is_asleep = True
        if not self.frees_memory:
            wait([replica.sleep() for replica in self._serving])
            return
        for replica in self._replicas:
            replica.gate.hold()
        wait([replica.sleep() for replica in self._replicas])
        for replica in self._replicas:
            replica.gate.wait_until_left()

    def wake(self) -> None:
        """Let all engines allocate their memory again."""
        self._allow_opening()
        self._is_asleep = False
        wait([replica.wake() for replica in self._serving])
        self._handle_events()

    def close(self) -> None:
        """Close all engines; running samples are dropped."""
        for replica in self._replicas:
            replica.close()
        for replica in self._replicas:
            replica.join()

    @property
    def _serving(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.state is ReplicaState.SERVING]

    def _allow_opening(self) -> None:
        for replica in self._replicas:
            replica.gate.release()

    def _wait_for_first(self) -> None:
        """Wait until an engine serves, and `GRACE_SECONDS` more for the others; raise a
        `ConfigError`, or the first error if none starts.
        """
        started, deadline = time.monotonic(), float("inf")
        errors: dict[Replica, RelaxError] = {}
        while len(errors) + len(self._serving) < len(self._replicas):
            left = deadline - time.monotonic()
            try:
                event = (
                    self._events.get(timeout=max(0.0, left))
                    if left < float("inf")
                    else self._events.get()
                )
            except queue.Empty:
                break
            if isinstance(event, ReplicaLost):
                errors.setdefault(event.replica, event.error)
                if isinstance(event.error, ConfigError):
                    raise event.error
            self._handle_event(event)
            self._require_engines()
            if self._serving and deadline == float("inf"):
                deadline = time.monotonic() + (time.monotonic() - started) + GRACE_SECONDS
        if not self._serving:
            raise next(iter(errors.values()))

    def _require_engines(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _handle_events(self, *, wait_seconds: float = 0.0, assigns: bool = True) -> bool:
        """Handle the events of the replicas, waiting for the first; return whether there was one.

        Args:
            wait_seconds: At most.
            assigns: Whether waiting samples are assigned to engines afterwards.
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
                self._handle_event(event)
                event = self._events.get_nowait()
        if assigns:
            self._assign_waiting()
        return True

    def _handle_event(self, event: ReplicaEvent | None) -> None:
        match event:
            case None:
                self._is_interrupted = True
            case ReplicaOpened(replica):
                self._catch_up(replica)
            case WeightsLoaded(replica, policy_version, None):
                if policy_version == self.policy_version:
                    self._serve(replica)
                else:
                    self._catch_up(replica)
            case WeightsLoaded(replica, policy_version, WeightsOverwritten()):
                log.info("engine.idled", engine=replica.name, policy_version=policy_version)
                replica.state = ReplicaState.IDLE
            case WeightsLoaded(replica, policy_version, error):
                replica.recycle(f"it did not load policy version {policy_version}: {error}")
            case SamplesFinished(replica, samples):
                self._finished += self._inflight.finish(samples, replica)
            case ReplicaLost(replica, error, samples):
                self._handle_loss(replica, error, samples)
            case ReplicaCrashed(error):
                self._failure = error

    def _catch_up(self, replica: Replica) -> None:
        """Let an engine load the router's version before it serves."""
        if (weights := self._weights) is None:
            self._serve(replica)
        else:
            self._serve_when_loaded(replica, weights, replica.load(weights, on_running="restart"))

    def _serve_when_loaded(self, replica: Replica, weights: Weights, load: Future[None]) -> None:
        replica.state = ReplicaState.LOADING
        self._update_metrics()
        verification = replica.verify(weights, load)
        verification.add_done_callback(
            lambda done: self._events.put(
                WeightsLoaded(replica, weights.policy_version, done.exception())
            )
        )

    def _serve(self, replica: Replica) -> None:
        if self._is_asleep:
            replica.sleep()
        if replica.circuit_breaker.is_half_open and replica.state is not ReplicaState.SERVING:
            log.info("engine.recovered", engine=replica.name, policy_version=self.policy_version)
        replica.state = ReplicaState.SERVING
        self._is_without_engines = False
        self._update_metrics()

    def _handle_loss(
        self, replica: Replica, error: RelaxError, samples: list[GeneratedSample]
    ) -> None:
        """Let the samples of a lost engine wait for another one."""
        replica.state = ReplicaState.LOST
        num_samples = self._inflight.unassign(replica, samples)
        log.error(
            "engine.lost",
            engine=replica.name,
            policy_version=self.policy_version,
            num_samples=num_samples,
            reason=str(error),
        )
        if self._metrics is not None:
            self._metrics.count_failure(num_samples)
        self._update_metrics()
        if all(
            one.circuit_breaker.num_failures > MAX_CONSECUTIVE_FAILURES for one in self._replicas
        ):
            times = f"{MAX_CONSECUTIVE_FAILURES + 1} times without a finished sample in between"
            self._failure = EngineFailed(
                f"every engine was lost {times}; the last one, {replica.name}: {error}"
            )

    def _assign_waiting(self) -> None:
        """Assign the samples that no engine has."""
        for request, entries in self._inflight.waiting():
            try:
                self._assign(request, entries)
            except PoisonSample as error:
                self._finished += self._inflight.finish_waiting(
                    entries, FinishReason.ERROR, error=str(error)
                )

    def _assign(self, request: GenerationRequest, entries: list[InflightSample]) -> None:
        """Submit samples of a prompt group to the first candidate that accepts them; they wait if
        none does.

        Raises:
            PoisonSample: The request can't be generated.
        """
        key, samples = request.prompt_group_id, tuple(entry.sample for entry in entries)
        serving = self._serving
        if not serving:
            self._log_no_engine()
        for replica in self._placement.candidates(key, serving, num_new=len(samples)):
            with suppress(EngineFailed):  # its `ReplicaLost` event follows
                replica.submit(replace(request, samples=samples))
                self._inflight.assign(entries, replica)
                self._placement.remember(key, replica)
                return

    def _log_no_engine(self) -> None:
        if not self._is_without_engines:
            self._is_without_engines = True
            log.warning(
                "engines.unavailable",
                num_samples=len(self._inflight),
                num_engines=len(self._replicas),
            )

    def _update_metrics(self) -> None:
        if self._metrics is not None:
            num_serving = len(self._serving)
            self._metrics.set_engines(serving=num_serving, away=len(self._replicas) - num_serving)
