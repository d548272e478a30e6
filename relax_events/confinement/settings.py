"""How a pool runs its children."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_events.confinement.entry_points import EntryPoint
from relax_events.confinement.frames import FrameLimits
from relax_events.confinement.profiles import Confinement, Profile

START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """How a pool runs its children.

    Attributes:
        entry_point: What the children do, with their module and profile.
        setup: The first message to each; `memory_bytes` is its limit.
        size: Number of children.
        start_seconds: Deadline of loading.
        silent_seconds: A child that has work and says nothing for so long is lost.
        fixed_facts: Keys of the first message that must be the same for all children, also for
            children that are started later.
        confines_itself: Whether the child applies the confinement that its setup names, once it has
            prepared what the profile would refuse, and before it touches foreign bytes.
        keeps_state: Whether a child's state is lost with it: then its requests are never repeated,
            and those that wait for the state are lost as `state_lost`.
        readable, writable, ports: What the entry point's profile opens; see `Confinement`.
        variables: Names of environment variables that it gets, in addition to the harmless ones.
        limits: The largest answer.
    """

    entry_point: EntryPoint
    setup: Mapping[str, Any]
    size: int = 1
    start_seconds: float = START_SECONDS
    silent_seconds: float | None = None
    fixed_facts: tuple[str, ...] = ()
    confines_itself: bool = False
    keeps_state: bool = False
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    variables: Iterable[str] = ()
    limits: FrameLimits = field(default_factory=FrameLimits)

    @property
    def confinement(self) -> Confinement:
        """The confinement in which each child starts."""
        return Confinement(
            Profile.TRUSTED if self.confines_itself else self.entry_point.profile,
            readable=self.readable,
            writable=self.writable,
            ports=self.ports,
        )
