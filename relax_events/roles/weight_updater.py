"""Loads new policy versions into an engine."""

from __future__ import annotations

import time

import structlog

from relax_events.engines.protocol import Engine
from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import now_micros
from relax_events.roles.engine_monitor import EngineMonitor
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.staleness import may_load
from relax_events.weights.transport import WeightsReader

log = structlog.get_logger()
RELOAD_SECONDS = 2.0


class WeightUpdater:
    """Loads the newest version according to `run.weight_update_mode`; retries an artifact that
    fails its check.
    """

    def __init__(
        self, worker: Worker, engine: Engine, transport: WeightsReader, watch: EngineMonitor
    ) -> None:
        self._worker, self._engine, self._transport, self._monitor = (
            worker,
            engine,
            transport,
            watch,
        )
        self._mode = worker.config.run.weight_update_mode
        self._reload_after = 0.0
        self.refused_version = -1
        """The last version that failed to load."""

    def update_if_newer(self) -> bool:
        """Load the newest version if it may be loaded now; return whether the engine has a new
        version and is awake.
        """
        newest = self._worker.control.latest
        if (
            newest is None
            or newest.policy_version <= self._engine.policy_version
            or self._transport.is_in_transit(newest)
        ):
            return False
        if newest.policy_version == self.refused_version and time.monotonic() < self._reload_after:
            return False
        if not may_load(self._mode, num_running=self._engine.num_running):
            return False
        try:
            with self._monitor.activity("loading"), self._worker.lifecycle.transfer("load weights"):
                weights = self._transport.fetch(newest)
                failpoint("rollout.before_load")
                self._engine.load_weights(
                    weights, on_running="swap" if self._mode == "in_flight" else "restart"
                )
        except (WeightsError, ObjectError) as error:
            log.error(
                "weights.load_failed",
                policy_version=newest.policy_version,
                serving=self._engine.policy_version,
                error=str(error),
            )
            self._reload_after, self.refused_version = (
                time.monotonic() + RELOAD_SECONDS,
                newest.policy_version,
            )
            self._worker.metrics.engine.count_load_failure()
            return False
        self._worker.heartbeat.set_policy_version(self._engine.policy_version)
        self._worker.metrics.weights.count_loaded(
            weights.transport, delay_seconds=(now_micros() - newest.published_at) / 1e6
        )
        log.info(
            "weights.loaded",
            policy_version=self._engine.policy_version,
            transport=weights.transport,
        )
        return True
