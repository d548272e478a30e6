"""Purges a long run automatically: `run.retain_versions`."""

from __future__ import annotations

from collections import Counter

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError, StoreUnavailable
from relax_events.events.parts import CheckpointRef
from relax_events.events.types import Event
from relax_events.ops.purge import oldest_retained
from relax_events.ops.run_purger import Purger, RetentionState
from relax_events.topics import TopicPlan

log = structlog.get_logger()


def num_versions_needed(config: RunConfig) -> int:
    """Return how many of the newest publications a purge needs.

    It needs the publications of the retained versions, of the versions kept for dependent runs, of
    their slots' next owners, and of the kept checkpoints.
    """
    if not config.run.retain_versions:
        return 0
    recovered = (config.trainer.keep_checkpoints + 1) * config.trainer.checkpoint_every
    return (
        config.run.retain_versions
        + config.run.follower_versions
        + 3 * TopicPlan.from_config(config).num_slots
        + recovered
    )


class RetentionManager:
    """Purges by `run.retain_versions`, once for each checkpoint that a step commits."""

    def __init__(self, purger: Purger, config: RunConfig) -> None:
        self._purger, self._config = purger, config
        self._books = RetentionState()
        self._purged_for: CheckpointRef | None = None

    def apply(self, event: Event) -> None:
        """Apply an event of the control log; a run that retains everything keeps no state."""
        if self._config.run.retain_versions:
            self._books.apply(event)

    def purge_if_due(self) -> Counter[str]:
        """Purge if a new checkpoint allows it; return the number of deleted records by entity.
        Records behind an unavailable broker are purged with the next checkpoint.
        """
        checkpoint = self._books.newest_checkpoint
        if (
            not self._config.run.retain_versions
            or self._config.is_replay
            or checkpoint in (None, self._purged_for)
        ):
            return Counter()  # only the source run may delete the samples of a replay
        former, self._purged_for = self._purged_for, checkpoint
        oldest = oldest_retained(self._config.run, newest_version=self._books.newest_version)
        try:
            deleted = self._purger.purge(self._purger.plan(self._books), self._books)
        except (BrokerError, StoreUnavailable) as error:
            log.warning("purge.failed", error=str(error))
            return Counter()
        needed = former.policy_version if former else 0  # the newest checkpoint may be incomplete
        self._books.forget_before(
            min(
                oldest - 2 * TopicPlan.from_config(self._config).num_slots,
                needed,
                self._purger.oldest_with_records,
            )
        )
        if deleted:
            log.info("records.purged", before_version=oldest, num_records=deleted.total())
        return deleted
