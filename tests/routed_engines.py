"""Routers over engines that a test can make fail, refuse weights or stay unavailable; otherwise
they are real engines of the tiny model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Literal

from engine_requests import make_engine

from relax_events.engines.protocol import Engine, EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.replicas.router import Router
from relax_events.errors import EngineFailed, EnvironmentProblem, WeightsError
from relax_events.weights import Weights

OPENING = threading.Lock()
"""transformers loads one model at a time: several threads at once get models with weights left
out."""
LONGEST_LOAD_SECONDS, HELD_SECONDS = 30.0, 0.05


class Fragile:
    """An engine whose server can be lost: then it returns what it has, and does nothing more."""

    def __init__(self, engine: Engine, site: Site) -> None:
        self._engine, self._site = engine, site
        self._interrupted = threading.Event()
        self.is_lost = False

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_tokens(self) -> int:
        return self._engine.num_tokens

    @property
    def usage(self) -> EngineUsage:
        return self._engine.usage

    def submit(self, request: GenerationRequest) -> None:
        self._require()
        self._engine.submit(request)
        self._site.submitted.append(request)

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        self._require()
        if self._site.is_held:
            self._interrupted.wait(min(timeout_seconds, HELD_SECONDS))
            self._interrupted.clear()
            self._require()
            return []
        return self._engine.poll(timeout_seconds=timeout_seconds)

    def interrupt(self) -> None:
        self._interrupted.set()
        self._engine.interrupt()

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        return self._engine.abort(sample_ids)

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        self._require()
        assert self._site.may_load.wait(LONGEST_LOAD_SECONDS)
        if self._site.refuses_weights:
            raise WeightsError(
                f"{self._site.name} takes no policy version {weights.policy_version}"
            )
        self._engine.load_weights(weights, on_running=on_running)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()

    def _require(self) -> None:
        if self.is_lost:
            raise EngineFailed(f"{self._site.name} is lost")


class Site:
    """Where an engine is opened, and opened again."""

    def __init__(self, name: str, open_engine: Callable[[], Engine]) -> None:
        self.name, self._open = name, open_engine
        self.refuses_weights = self.is_away = False
        self.is_held = False
        """Whether the engine samples nothing for now."""
        self.may_load = threading.Event()
        self.may_load.set()
        self.engines: list[Fragile] = []
        self.submitted: list[GenerationRequest] = []

    def make(self) -> Fragile:
        """Open an engine, unless the machine is away."""
        if self.is_away:
            raise EnvironmentProblem(f"{self.name} is away")
        with OPENING:
            self.engines.append(Fragile(self._open(), self))
        return self.engines[-1]

    def record_failure(self) -> None:
        """Have the engine of the moment lost."""
        if self.engines:
            self.engines[-1].is_lost = True
            self.engines[-1].interrupt()


def make_sites(count: int, **settings: Any) -> list[Site]:
    """Make sites for engines over the tiny model."""
    return [Site(f"engine-{index}", lambda: make_engine(**settings)) for index in range(count)]


def make_router(sites: list[Site]) -> Router:
    """Open a router over sites."""
    return Router({site.name: site.make for site in sites})
