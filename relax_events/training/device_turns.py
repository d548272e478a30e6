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
from relax_events.runtime.device_turn import DeviceTurn
from relax_events.runtime.resident_memory import resident_bytes
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import OffloadingBackend, TrainerBackend
from relax_events.training.ranks import Ranks
from relax_events.training.shared_device import find_lock

log = structlog.get_logger()
ROUND_SECONDS = 0.25
"""Wait for the device between two rounds of collectives."""


class DeviceTurns:
    """Holds the devices of all ranks during a step, and leaves them in between; without
    `devices.time_share` the model stays where it is.

    Of ranks on one device, as on a CPU, the first has the turn of all. Everything is collective.
    """

    def __init__(self, worker: Worker, ranks: Ranks) -> None:
        """Wait for the first turn, in which the model is loaded and the log's steps are recovered;
        the drain ends the wait.
        """
        self._worker, self._ranks = worker, ranks
        self._backend: OffloadingBackend | None = None
        self._turn: DeviceTurn | None = None
        self.are_taken = worker.config.devices.time_share
        """Whether the trainer has to end its turns."""
        self.has_device = not self.are_taken
        """Whether the model may be on the device now."""
        if self.are_taken:
            path = find_lock(worker.config, local_rank=ranks.local_rank)
            paths = ranks.all_gather_bytes(str(path).encode())
            if paths.index(str(path).encode()) == ranks.rank:
                self._turn = DeviceTurn(path, alone=True)
            self.has_device = self._wait(self._agree_to_stop)

    def share(self, backend: TrainerBackend) -> None:
        """Move this backend off the device between turns.

        Raises:
            ConfigError: It can't.
        """
        if not self.are_taken:
            return
        if not isinstance(backend, OffloadingBackend):
            raise ConfigError(
                f"devices.time_share = true needs a backend that leaves the device, and "
                f"trainer.backend = {self._worker.config.trainer.backend!r} does not; set "
                "trainer.backend = 'torch'"
            )
        self._backend = backend

    def begin(self, agree_to_drain: Callable[[], bool]) -> bool:
        """Wait until every rank has its device, and bring the model back; return False when the
        drain came first.

        Args:
            agree_to_drain: Returns on all ranks whether one of them drains.
        """
        if self.has_device or self._backend is None:
            return True
        started = time.monotonic()

        def may_stop() -> bool:
            self._worker.lifecycle.tick(working=False)
            return agree_to_drain()

        self.has_device = self._wait(may_stop)
        if not self.has_device:
            return False
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
        if self._backend is None or not self.has_device:
            return
        started, before = time.monotonic(), resident_bytes()
        with self._worker.lifecycle.transfer("move the model off the device"):
            num_bytes = self._backend.move_away()
            self._ranks.all_gather_bytes(b"")  # all have left
        self.has_device = False
        if self._turn is not None:
            self._turn.end()
        log.info(
            "device.left",
            num_bytes=num_bytes,
            seconds=round(time.monotonic() - started, 3),
            resident_bytes=resident_bytes(),
            resident_bytes_before=before,
        )

    def _wait(self, may_stop: Callable[[], bool]) -> bool:
        """Wait until all turns have begun; return False if `may_stop` says so on all ranks."""
        while True:
            has_begun = self._turn is None or self._turn.wait(ROUND_SECONDS)
            if all(flag[0] for flag in self._ranks.all_gather_bytes(bytes([has_begun]))):
                return True
            if may_stop():
                return False

    def _agree_to_stop(self) -> bool:
        flag = bytes([self._worker.drain.requested])
        return any(flag[0] for flag in self._ranks.all_gather_bytes(flag))
