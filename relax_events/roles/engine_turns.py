"""An engine's turns on a device that it shares with the trainer (`devices.time_share`).

    a prompt group can be generated ──▶ ask for the device ──▶ weights onto it, generate all there
    is ──▶ nothing more for a moment: weights and cache off the device ──▶ end the turn

The trainer waits for the end of all engines' turns, and they for the end of its own. With
`run.mode = "async"` an engine always finds more to generate: it also leaves when the trainer waits
for the device, and continues what it was generating in its next turn. So the trainer lends the
device while it has no train batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import structlog

from relax_events.engines.protocol import Engine
from relax_events.runtime.device_turn import DeviceTurn
from relax_events.runtime.resident_memory import resident_bytes
from relax_events.runtime.worker import Worker
from relax_events.training.shared_device import find_lock, wait_for_turn

log = structlog.get_logger()


@runtime_checkable
class OffloadingEngine(Protocol):
    """An engine that can free its weights while it sleeps, also on the CPU."""

    def offload_to(self, folder: Path) -> None:
        """Free the weights in every sleep from now on; weights on the CPU go to a file there."""
        ...


class EngineTurns:
    """The turns of a rollout worker's engine; without `devices.time_share` the device is always
    its own.
    """

    def __init__(self, worker: Worker) -> None:
        """Wait for the first turn, in which the engine is loaded; the drain ends the wait."""
        self._on_begin: Callable[[], None] = lambda: None
        self._turn: DeviceTurn | None = None
        self._is_lent = worker.config.run.mode != "sync"
        if worker.config.devices.time_share:
            self._turn = DeviceTurn(find_lock(worker.config), alone=False)
            wait_for_turn(self._turn, worker.drain)

    def call_on_begin(self, on_begin: Callable[[], None]) -> None:
        """Call this from another thread when a later turn begins."""
        self._on_begin = on_begin

    def may_work(self, *, has_work: bool) -> bool:
        """Return whether the engine may use the device now; ask for it if there is work."""
        if self._turn is None or self._turn.has_begun:
            return True
        return has_work and self._turn.ask(self._on_begin)

    @property
    def are_taken(self) -> bool:
        """Whether the engine has to end its turns."""
        return self._turn is not None

    def must_end(self) -> bool:
        """Return whether the trainer waits for a device that it lent."""
        return self._is_lent and self._turn is not None and self._turn.is_wanted()

    @property
    def has_device(self) -> bool:
        """Whether a turn has begun that `sleep` ends. A sleeping engine may have memory on the
        device then, after a failed load.
        """
        return self._turn is not None and self._turn.has_begun

    def sleep(self, engine: Engine) -> None:
        """Free the engine's memory, and let others use the device."""
        before, num_running = resident_bytes(), engine.num_running
        engine.sleep()
        if self._turn is not None:
            log.info(
                "device.left",
                resident_bytes=resident_bytes(),
                resident_bytes_before=before,
                num_running=num_running,
            )
            self._turn.end()
