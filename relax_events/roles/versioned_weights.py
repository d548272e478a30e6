"""Loads the weights of a wanted policy version into a scorer: of actor-forward, and of a reference
that is refreshed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import structlog

from relax_events.errors import PoisonSample, WeightsError
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import Scorer
from relax_events.weights.manifest import Weights
from relax_events.weights.transport import WeightsReader

log = structlog.get_logger()
MAX_VERSIONS = 2
"""Versions whose weights are held in memory: two, because samples of neighbouring versions may
alternate."""
READS_BETWEEN, MIN_LOST_SECONDS, MAX_LOST_SECONDS = 10.0, 1.0, 30.0
"""An unreadable version is read again, since its objects may have been restored: after ten times as
long as the failed read took, within these bounds. Meanwhile its prompt groups end as expired."""


class VersionedWeights:
    """Loads the weights of the wanted version into the scorer.

    Samples arrive by version, oldest first, so only a few versions are cached.
    """

    def __init__(
        self,
        worker: Worker,
        scorer: Scorer,
        transport: WeightsReader,
        *,
        num_kept: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold nothing yet.

        Args:
            worker: Of the role.
            scorer: Where the weights go.
            transport: Where they come from.
            num_kept: Newest versions that may be needed; by default the versions that have a slot.
            clock: Monotonic seconds.
        """
        self._num_kept = worker.plan.num_slots if num_kept is None else num_kept
        self._worker, self._scorer, self._transport = worker, scorer, transport
        self._published: dict[int, PolicyVersionPublished] = {}
        self._cached: OrderedDict[int, Weights] = OrderedDict()
        self._clock = clock
        self._lost: dict[int, tuple[float, WeightsError]] = {}
        """Monotonic time of the next read, and reason of the last failed one, by version."""
        self._held = -1

    def apply(self, event: Event) -> None:
        """Keep a published version, and drop the versions that left the window."""
        if isinstance(event, PolicyVersionPublished):
            self._published[event.policy_version] = event
            self._published.pop(event.policy_version - self._num_kept, None)
            self._lost.pop(event.policy_version - self._num_kept, None)

    def use(self, policy_version: int) -> int:
        """Load the weights of a version into the scorer; return the version.

        Raises:
            PoisonSample: The version was never published, or has left the window.
            WeightsError: Its artifact is unreadable, or was so at the last read.
        """
        if policy_version == self._held:
            return policy_version
        next_at, error = self._lost.get(policy_version, (0.0, None))
        if error is not None and self._clock() < next_at:
            raise error
        with self._worker.lifecycle.transfer("load weights"):
            if policy_version not in self._cached:
                self._make_room()
                self._cached[policy_version] = self._read(policy_version)
            self._cached.move_to_end(policy_version)
            self._scorer.load_weights(self._cached[policy_version])
        self._held = policy_version
        self._worker.heartbeat.set_policy_version(policy_version)
        return policy_version

    def _make_room(self) -> None:
        """Drop versions before the next one is read: all but the newest ones, and versions that the
        trainer sent, whose memory may be received into again.
        """
        for version, weights in list(self._cached.items()):
            if weights.transport != "store":
                del self._cached[version]
        while len(self._cached) >= MAX_VERSIONS:
            self._cached.popitem(last=False)

    def _read(self, policy_version: int) -> Weights:
        latest = self._worker.control.latest  # known an instant before the event arrives here
        published = (
            latest
            if latest and latest.policy_version == policy_version
            else self._published.get(policy_version)
        )
        if published is None:
            raise PoisonSample(
                f"policy version {policy_version} is not among the published ones in the "
                f"window, {sorted(self._published)}"
            )
        began = self._clock()
        try:
            weights = self._transport.fetch(published)
        except WeightsError as error:
            lost = WeightsError(
                f"{error}; restore the object, or start the run again: its trainer writes its "
                "newest version again; or fork it from an older version"
            )
            now = self._clock()
            wait = min(max(READS_BETWEEN * (now - began), MIN_LOST_SECONDS), MAX_LOST_SECONDS)
            self._lost[policy_version] = now + wait, lost
            raise lost from error
        log.info("weights.loaded", policy_version=policy_version, transport=weights.transport)
        return weights
