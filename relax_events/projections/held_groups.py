"""Which prompt groups are held by rollout workers that have become silent.

The broker keeps a lease until the connection of its holder closes or the lease lapses. A process
that dies closes its connections, a host that is cut off or gone does not. Heartbeats show it: each
rollout worker lists the prompt groups that it holds, and sends no list once it is gone.

    heartbeat lists a prompt group ──▶ held ──▶ another process lists it, or wrote it ──▶ forgotten
                                        └─────▶ no heartbeat of its holder for a while ──▶ lost
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat


@dataclass(slots=True, eq=False)
class _Process:
    """A process as of its last heartbeat, and what it listed there."""

    heartbeat: WorkerHeartbeat
    heard_at: float
    listed: set[str] = field(default_factory=set)

    def is_heard(self, *, now: float, silent_seconds: float) -> bool:
        """Return whether its last heartbeat was received so recently."""
        return now - self.heard_at <= silent_seconds

    def is_replaced_by(self, heartbeat: WorkerHeartbeat) -> bool:
        """Return whether a heartbeat of its worker id is another, later process's. A process in a
        container may have the id of the one before.
        """
        last = self.heartbeat
        is_other = (last.host, last.pid) != (heartbeat.host, heartbeat.pid)
        return is_other or heartbeat.num_processed < last.num_processed

    def has_closed(self, heartbeat: WorkerHeartbeat) -> bool:
        """Return whether the heartbeat of its successor shows that its connections are closed: it
        is of the same host. Where names and process ids are alike, as in containers, it is unknown.
        """
        last = self.heartbeat
        return last.host == heartbeat.host and last.pid != heartbeat.pid


class HeldPromptGroups:
    """Folds the heartbeats of the rollout role; times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._newest: dict[str, _Process] = {}
        self._replaced: list[_Process] = []
        self._holders: dict[str, _Process] = {}
        self._asked_at: float | None = None

    def count_workers(self, *, now: float, silent_seconds: float) -> int:
        """Return how many workers there are: they have sent a heartbeat since, and not said that
        they stop.
        """
        return sum(
            process.is_heard(now=now, silent_seconds=silent_seconds)
            for process in self._newest.values()
        )

    def apply(self, heartbeat: WorkerHeartbeat, *, now: float) -> None:
        """Apply a heartbeat that was received now."""
        process = self._newest.get(heartbeat.worker_id)
        if process is not None and process.is_replaced_by(heartbeat):
            if process.has_closed(heartbeat):
                self._forget(process, process.listed)
            else:
                self._replaced.append(process)
            process = None
        if process is None:
            process = self._newest[heartbeat.worker_id] = _Process(heartbeat, now)
        before, process.listed = process.listed, set(heartbeat.prompt_groups_in_flight)
        process.heartbeat, process.heard_at = heartbeat, now
        self._forget(process, before - process.listed)
        self._holders.update(dict.fromkeys(process.listed, process))
        for prompt_group_id in heartbeat.prompt_groups_written:
            self._holders.pop(prompt_group_id, None)
        if heartbeat.state is WorkerState.STOPPED:
            self._forget(process, process.listed)  # it returned them
            del self._newest[heartbeat.worker_id]

    def postpone(self, *, now: float) -> None:
        """Count all silence from now on: until now no heartbeat could be received."""
        for process in (*self._newest.values(), *self._replaced):
            process.heard_at = now

    def take_lost(
        self, *, now: float, silent_seconds: float, awaited: Set[str]
    ) -> dict[str, list[str]]:
        """Return, once, the prompt groups of processes that have been silent for longer, by worker
        id. Call it often: a caller that was stopped for a while has received no heartbeat either,
        and that silence does not count.

        Args:
            now: The time.
            silent_seconds: The longest silence of a living process.
            awaited: The prompt groups that still have to be generated.
        """
        before, self._asked_at = self._asked_at, now
        if before is not None and now - before > silent_seconds / 2:
            self.postpone(now=now)
        lost: dict[str, list[str]] = {}
        for process in (*self._newest.values(), *self._replaced):
            if process.is_heard(now=now, silent_seconds=silent_seconds) or not process.listed:
                continue
            listed, process.listed = process.listed, set()
            if groups := sorted(self._forget(process, listed) & awaited):
                lost.setdefault(process.heartbeat.worker_id, []).extend(groups)
        self._replaced = [process for process in self._replaced if process.listed]
        return lost

    def _forget(self, process: _Process, prompt_groups: Iterable[str]) -> set[str]:
        """Forget that a process holds prompt groups; return those that it held as the last one."""
        mine = {name for name in prompt_groups if self._holders.get(name) is process}
        for name in mine:
            del self._holders[name]
        return mine
