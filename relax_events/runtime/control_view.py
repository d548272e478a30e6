"""A worker's view of the control log: the newest policy version, and commands to this worker."""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog

from relax_events.errors import ClientFailed, PoisonSample
from relax_events.events.parts import Command
from relax_events.events.types import Event, PolicyVersionPublished, RunCommanded
from relax_events.runtime.control_follower import NO_START_OFFSETS, ControlFollower, Listener
from relax_events.runtime.drain import Drain
from relax_events.staleness import is_expired

log = structlog.get_logger()
ANNOUNCEMENT_SECONDS = 30.0
RESTART_CODE = 8
"""Exit code of a worker that a restart command ended."""


class ControlView:
    """Holds the newest policy version, and executes the controller's commands to this worker."""

    def __init__(
        self,
        follower: ControlFollower,
        role: str,
        worker_id: str,
        *,
        max_staleness: int,
        drain: Drain,
        started_at: int,
    ) -> None:
        """Take a follower that has not started yet.

        Args:
            follower: Reads the control topics.
            role: Role of this worker.
            worker_id: Id of this worker.
            max_staleness: Versions that a sample may be behind.
            drain: Starts on a stop or drain command.
            started_at: Start of this process, in microseconds since the epoch; earlier commands to
                this worker id are ignored.
        """
        self.follower, self.is_paused = follower, False
        self._role, self._worker_id, self._max_staleness = role, worker_id, max_staleness
        self._drain, self._started_at = drain, started_at

    @property
    def latest(self) -> PolicyVersionPublished | None:
        """The newest publication of a policy version."""
        return self.follower.latest

    @property
    def policy_version(self) -> int:
        """The newest published version, -1 before the first."""
        return self.follower.policy_version

    def follow(
        self, *listeners: Listener, start_offsets: Mapping[str, int] = NO_START_OFFSETS
    ) -> None:
        """Start following the control log; a stop or drain for this worker starts the drain, after
        the listeners have received it.

        A restart command ends this process at once, as a kill would; its supervisor starts it
        again. `start_offsets` as for `ControlFollower.start`.
        """
        self.follower.start(*listeners, self._handle_command, start_offsets=start_offsets)

    def is_expired(self, policy_version: int | None) -> bool:
        """Return whether a version has left the window, as far as this worker knows."""
        return policy_version is not None and is_expired(
            policy_version,
            trainer_version=self.policy_version,
            max_staleness=self._max_staleness,
        )

    def wait_for_version(self, version: int, *, timeout_seconds: float) -> bool:
        """Wait until `version` or a newer one is published."""
        return self.follower.wait_for_version(version, timeout_seconds=timeout_seconds)

    def wait_until_published(self, policy_version: int) -> None:
        """Wait a moment for a sample's version: the sample may arrive before the version's
        publication, which is on another topic.

        A sample is written after its version is published, so the log shows at once whether the
        version exists: records of versions that were never published cause no delay. If the log
        can't be read, the worker exits, and its successor reads the sample again.

        Raises:
            PoisonSample: The version is not published.
            BrokerError: The log can't be read.
            ClientFailed: The version is published, but the client of the control topics does not
                receive it.
        """
        newest_version = self.policy_version
        if policy_version <= newest_version:
            return
        if not self.follower.is_published(policy_version):
            if newest_version < 0:
                return  # there are no versions: a role that needs one says so
            raise PoisonSample(
                f"the sample is of policy version {policy_version}, which was never "
                f"published; the newest is {newest_version}"
            )
        if not self.wait_for_version(policy_version, timeout_seconds=ANNOUNCEMENT_SECONDS):
            raise ClientFailed(
                f"policy version {policy_version} is published, and the client of the control "
                f"topics has not received it within {ANNOUNCEMENT_SECONDS:g} s, only versions up "
                f"to {newest_version}; this process must be restarted to receive versions"
            )

    def _handle_command(self, event: Event) -> None:
        if (
            not isinstance(event, RunCommanded)
            or (event.role or self._role) != self._role
            or (event.worker_id or self._worker_id) != self._worker_id
        ):
            return
        if event.command in (Command.PAUSE, Command.RESUME):
            self.is_paused = event.command is Command.PAUSE
        is_fresh = event.worker_id is None or event.commanded_at > self._started_at
        if event.command is Command.RESTART and is_fresh:
            log.warning("worker.killed", reason=event.reason)
            # the work loop hangs, so it would not drain either
            os._exit(RESTART_CODE)
        if event.command in (Command.STOP, Command.DRAIN) and is_fresh:
            log.info("worker.commanded", command=event.command, reason=event.reason)
            self._drain.start()
