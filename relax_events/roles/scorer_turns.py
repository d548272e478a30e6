"""The turns of reference and actor-forward on a device that they share with trainer and engines
(`devices.time_share` with `workers.hybrid`).

    engines have left ──▶ samples can be scored: wait for the device, models onto it ──▶ score all
    there is ──▶ nothing more for a moment: models off the device ──▶ end the turn ──▶ trainer
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import structlog

from relax_events.errors import ConfigError
from relax_events.runtime.device_turn import DeviceTurn
from relax_events.runtime.hosting import current_host
from relax_events.runtime.resident_memory import resident_bytes
from relax_events.runtime.worker import Worker
from relax_events.training.shared_device import find_lock

log = structlog.get_logger()
WAIT_SECONDS = 0.5


@runtime_checkable
class OffloadingScorer(Protocol):
    """A scorer that can leave its device to others between two calls."""

    def offload_to(self, folder: Path) -> None:
        """Let `move_away` free the memory of the CPU too, in favour of a file in this folder."""
        ...

    def move_away(self) -> int:
        """Free the memory of the weights; return how many bytes that are."""
        ...

    def bring_back(self) -> None:
        """Restore the weights."""
        ...


class ScorerTurns:
    """The turns of all scorers of a process; without a device in turns it is always theirs.
    Thread-safe.
    """

    def __init__(self, turn: DeviceTurn | None, *, folder: Path) -> None:
        """Start without a turn.

        Args:
            turn: On the device; None if it is not held in turn.
            folder: Where memory of the CPU goes.
        """
        self._turn, self._folder = turn, folder
        self._lock = threading.Lock()
        self._roles: set[str] = set()
        """Roles that have work on the device."""
        self._scorers: list[OffloadingScorer] = []
        self._are_away = False

    @classmethod
    def of_worker(cls, worker: Worker) -> ScorerTurns:
        """Return the turns of a worker's process, and wait for one, in which its model is loaded;
        the drain ends the wait.
        """
        config = worker.config

        def build() -> ScorerTurns:
            is_shared = config.devices.time_share and config.workers.hybrid
            turn = DeviceTurn(find_lock(config), alone=True) if is_shared else None
            return cls(turn, folder=config.devices_directory)

        host = current_host()
        turns: ScorerTurns = build() if host is None else host.share("scorer-turns", build)
        while not turns.may_work(worker.role, has_work=True):
            if worker.drain.wait(WAIT_SECONDS):
                break
            worker.lifecycle.record_progress()
        return turns

    def add(self, scorer: object) -> None:
        """Move this scorer off the device between turns.

        Raises:
            ConfigError: It can't leave.
        """
        if self._turn is None:
            return
        if not isinstance(scorer, OffloadingScorer):
            raise ConfigError(
                "devices.time_share with workers.hybrid needs scorers that leave the device, and "
                "the scorers of trainer.backend do not; set workers.hybrid = false"
            )
        scorer.offload_to(self._folder)
        with self._lock:
            self._scorers.append(scorer)

    def bind_role(self, role: str) -> Callable[[bool], bool]:
        """Return what a role's loop asks in each round: whether it may score, given whether it has
        samples.
        """
        return lambda has_work: self.may_work(role, has_work=has_work)

    def may_work(self, role: str, *, has_work: bool) -> bool:
        """Return whether a role may use the device now. With work it is asked for; when no role has
        any, the turn ends.
        """
        if self._turn is None:
            return True
        with self._lock:
            if has_work:
                self._roles.add(role)
                return self._turn.ask() and self._bring_back()
            self._roles.discard(role)
            if not self._roles and self._turn.has_begun:
                self._leave(self._turn)
            return False

    def _bring_back(self) -> bool:
        if self._are_away:
            for scorer in self._scorers:
                scorer.bring_back()
            self._are_away = False
            log.info("device.entered", resident_bytes=resident_bytes())
        return True

    def _leave(self, turn: DeviceTurn) -> None:
        if not self._are_away:
            before = resident_bytes()
            num_bytes = sum(scorer.move_away() for scorer in self._scorers)
            self._are_away = True
            log.info(
                "device.left",
                num_bytes=num_bytes,
                resident_bytes=resident_bytes(),
                resident_bytes_before=before,
            )
        turn.end()
