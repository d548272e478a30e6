"""The section `weights`: how policy versions reach the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import Seconds, Section
from relax_events.config.external_values import Listener


class WeightsConfig(Section):
    """How new policy versions reach the rollout workers. The object store has every version,
    whatever is set here.
    """

    transport: Literal["store", "gloo", "nccl"] = "store"
    """`store`: from the object store. `gloo`, `nccl`: the trainer sends them to the rollout workers
    that are present, over TCP or between GPUs; who was not there, or did not get a version whole
    and in time, takes it from the store."""
    use_shared_memory: bool = True
    """Write a version straight into the memory of workers that run beside the trainer, as its user
    and in its container, in place of sending it."""
    async_publish: bool = False
    """Write a version, and commit the step that made it, while the next step is trained; else the
    trainer waits for the store."""
    full_snapshot_interval: Annotated[int, Field(ge=1, le=1000)] = 1
    """Every so many versions the store gets all values, and in between only those that have changed
    since the version before; 1 writes all of them always. For weights of 16 bits, where a step
    changes few values. Costs a copy of the weights in the memory of each who writes or reads."""
    keep_newest: Annotated[int, Field(ge=0)] = 0
    """How many of the newest versions keep their weights in the store. At least twice the slots of
    the ring (`run.max_staleness` + 2) are kept,
    which is what 0 means: a version of a 4B model is 8 GB."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Besides the newest, versions whose number this divides keep their weights; 0 keeps none
    so."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Besides the newest, so many versions keep their weights that have the highest mean reward
    over the datasets of `evaluation`."""
    host: Listener = "127.0.0.1"
    """Address of the trainer's machine, on which it listens for engines; the workers of other
    machines need one that they can reach."""
    bucket_bytes: Annotated[int, Field(ge=64, multiple_of=64)] = 16 * 1024 * 1024
    """Bytes that are sent at a time."""
    deadline_seconds: Seconds = 60.0
    """How long sending a version to an engine may take; one that takes longer is left to the store,
    and joins again."""
    stall_seconds: Seconds = 10.0
    """How long a bucket may take; whoever hangs on the way is given up after this."""
