"""The trainer's turns on devices that it shares with engines (`devices.time_share`).

    all prompt groups of a step are ready ──▶ wait until no engine holds the device ──▶ model onto
    the device ──▶ train, copy the weights and the checkpoint ──▶ model off the device ──▶ commit

The commit publishes the version that the engines wait for, so they find the device free.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from relax_events.errors import ConfigError
from relax_events.models.shared_device import open_turn, wait_for_turn
from relax_events.runtime.device_turn import DeviceTurn
from relax_events.runtime.resident_memory import resident_bytes
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import OffloadingBackend, TrainerBackend
from relax_events.training.ranks import Ranks

log = structlog.get_logger()
ROUND_SECONDS = 0.25
"""Wait for the device between two rounds of collectives."""


class DeviceTurns:
    """Holds the devices of all ranks during a step, and leaves them in between; without
    `devices.time_share` the model stays where it is.

    `begin` and `end` are collective.
    """

    def __init__(self, worker: Worker, ranks: Ranks) -> None:
        """Wait for the first turn, in which the model is loaded and the log's steps are recovered;
        the drain ends the wait.
        """
        self._worker, self._ranks = worker, ranks
        self._backend: OffloadingBackend | None = None
        self._turn: DeviceTurn | None = None
        if worker.config.devices.time_share:
            self._turn = open_turn(worker.config, alone=True, local_rank=ranks.local_rank)
            wait_for_turn(self._turn, worker.drain)

    def share(self, backend: TrainerBackend) -> None:
        """Move this backend off the device between turns.

        Raises:
            ConfigError: It can't.
        """
        if self._turn is None:
            return
        if not isinstance(backend, OffloadingBackend):
            raise ConfigError(
                f"devices.time_share = true needs a backend that leaves the device, and "
                f"trainer.backend = {self._worker.config.trainer.backend!r} does not; set "
                "trainer.backend = 'torch'"
            )
        self._backend = backend

    @property
    def are_taken(self) -> bool:
        """Whether the trainer has to end its turns."""
        return self._turn is not None

    def begin(self, agree_to_drain: Callable[[], bool]) -> bool:
        """Wait until every rank has its device, and bring the model back; return False when the
        drain came first.

        Args:
            agree_to_drain: Returns on all ranks whether one of them drains.
        """
        turn = self._turn
        if turn is None or self._backend is None or self._is_held:
            return True
        started = time.monotonic()
        turn.ask()
        while not self._have_all_begun(turn.wait(ROUND_SECONDS)):
            if agree_to_drain():
                turn.end()
                return False
            self._worker.lifecycle.tick(working=False)
        waited = time.monotonic()
        with self._worker.lifecycle.transfer("bring the model to the device"):
            self._backend.bring_back()
        log.info(
            "device.entered",
            wait_seconds=round(waited - started, 3),
            load_seconds=round(time.monotonic() - waited, 3),
            resident_bytes=resident_bytes(),
        )
        return True

    def end(self) -> None:
        """Free the device's memory and end the turn; does nothing outside of one."""
        if self._turn is None or self._backend is None or not self._is_held:
            return
        started, before = time.monotonic(), resident_bytes()
        with self._worker.lifecycle.transfer("move the model off the device"):
            num_bytes = self._backend.move_away()
        self._turn.end()
        log.info(
            "device.left",
            num_bytes=num_bytes,
            seconds=round(time.monotonic() - started, 3),
            resident_bytes=resident_bytes(),
            resident_bytes_before=before,
        )

    @property
    def _is_held(self) -> bool:
        return self._turn is not None and self._turn.has_begun

    def _have_all_begun(self, has_begun: bool) -> bool:
        return all(flag[0] for flag in self._ranks.all_gather_bytes(bytes([has_begun])))
