"""The section `weights`: how policy versions reach the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import Seconds, Section
from relax_events.config.external_values import Listener


class WeightsConfig(Section):
    """How rollout workers receive new policy versions. The object store holds every version in all
    cases.
    """

    transport: Literal["store", "gloo", "nccl"] = "store"
    """`store`: from the object store. `gloo`, `nccl`: the trainer sends them to the connected
    rollout workers, over TCP or between GPUs; a worker that missed a version reads it from the
    store."""
    use_shared_memory: bool = True
    """Write a version directly into the memory of workers on the trainer's machine, of the same
    user and network namespace, instead of sending it."""
    async_publish: bool = True
    """Write a version, and commit its step, while the next step is trained: a step waits only for a
    copy of the weights in the memory of rank 0's host. Otherwise, and with `run.max_staleness = 0`,
    where the next step's samples need the version first, the trainer waits for the store."""
    full_snapshot_interval: Annotated[int, Field(ge=1, le=1000)] = 1
    """Versions between full snapshots in the store; versions in between hold only the values
    changed since the version before. 1 always writes full snapshots. For 16-bit weights, where a
    step changes few values. Costs a copy of the weights in the memory of each writer and reader."""
    keep_newest: Annotated[int, Field(ge=0)] = 0
    """Number of newest versions whose weights stay in the store, at least twice the version slots
    (`run.max_staleness` + 2). 0 means that minimum: a version of a 4B model is 8 GB."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Also keep the weights of versions divisible by this; 0 keeps none."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep the weights of this many versions with the highest mean reward over the
    `evaluation` datasets."""
    host: Listener = "127.0.0.1"
    """Address on which the trainer listens for engines; workers on other machines must be able to
    reach it."""
    bucket_bytes: Annotated[int, Field(ge=64, multiple_of=64)] = 16 * 1024 * 1024
    """Bytes sent at a time."""
    deadline_seconds: Seconds = 60.0
    """Deadline for sending a version to an engine; a slower engine reads it from the store, and
    rejoins. An engine that takes no part of it for a sixth of this time is disconnected."""

    @property
    def stall_seconds(self) -> float:
        """Deadline for one bucket; an engine that exceeds it is disconnected."""
        return self.deadline_seconds / 6
