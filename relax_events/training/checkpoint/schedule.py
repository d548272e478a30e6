"""Take checkpoints of the training state when they are due, in parallel to the next steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from relax_events.config.training import TrainerConfig
from relax_events.events.parts import CheckpointRef
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.checkpoint.pending import PendingCheckpoint
from relax_events.training.ranks import Ranks

log = structlog.get_logger()


class CheckpointSchedule:
    """Starts one checkpoint at a time, and knows the newest one that is written."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, config: TrainerConfig) -> None:
        self._checkpoints, self._ranks, self._config = checkpoints, ranks, config
        self._pending: PendingCheckpoint | None = None
        self._started_at = time.monotonic()
        self.written: CheckpointRef | None = None
        """The newest written checkpoint, which the next step's record names."""

    def restart_clock(self) -> None:
        """Count the time to the next checkpoint from now."""
        self._started_at = time.monotonic()

    def poll(self) -> None:
        """Take note of a checkpoint that has been written."""
        if self._pending is not None and (reference := self._pending.poll()) is not None:
            self._pending, self.written = None, reference
            log.info("checkpoint.written", policy_version=reference.policy_version)

    def start_if_due(self, policy_version: int, save: Callable[[], PendingCheckpoint]) -> None:
        """Start a checkpoint with `save` when one is due and none is being written. It becomes real
        when a later step's record names it. Collective.
        """
        if self._pending is not None or not self._is_due(policy_version):
            return
        self._started_at = time.monotonic()
        self._pending = save()

    def _is_due(self, version: int) -> bool:
        """Return whether a checkpoint is due by steps, or by rank 0's clock; all ranks get the same
        answer.
        """
        seconds = time.monotonic() - self._started_at
        is_due = self._config.checkpoint_is_due(version, seconds=seconds)
        if self._ranks.size == 1:
            return is_due
        return self._ranks.broadcast(bytes([is_due]) if self._ranks.rank == 0 else None) == bytes(
            [True]
        )
