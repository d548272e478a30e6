"""The sections `devices` and `hosts`: which roles compute on which GPUs, of which machines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_events.config.base import Section
from relax_events.config.external_values import Addresses, Program
from relax_events.config.resume_rules import free

HOST = "{host}"
Indices = tuple[Annotated[int, Field(ge=0)], ...]


class DevicesConfig(Section):
    """GPUs by role, as indices among the GPUs that `relax run` sees (`CUDA_VISIBLE_DEVICES`).

    A role that is left out is placed by itself: each rank of the trainer on a device of its own
    from 0 on, the other roles on the devices that are left, or with the trainer where none is. The
    workers of a role take the devices of its list in turn, and may share them with other roles.
    `relax plan` shows the result, and what each device has to hold.
    """

    trainer: Indices = ()
    """One for each rank of the trainer."""
    rollout: Indices = ()
    """Rollout workers, with their engines."""
    reference: Indices = ()
    """Reference workers."""
    actor_forward: Indices = ()
    """Actor-forward workers."""
    critic: Indices = ()
    """One for each rank of the critic."""
    teacher: Indices = ()
    """Teacher workers."""
    judge: Indices = ()
    """Judge workers, with their engines."""
    evaluator: Indices = ()
    """The evaluator, with its engine."""
    time_share: Annotated[bool, free("memory against time")] = False
    """Whether the trainer and the rollout workers on its devices hold them in turn: each frees the
    memory of its model while the other works. With `run.mode = "async"` the trainer lends them: the
    engines, which must be `transformers` then, leave as soon as a train batch is complete, and
    continue afterwards. On the CPU the memory goes to a file in the run's folder; an SGLang server
    keeps its memory there."""

    def by_role(self) -> dict[str, tuple[int, ...]]:
        """Return the devices of the roles that the run file names."""
        return {
            name.replace("_", "-"): named
            for name in type(self).model_fields
            if isinstance(named := getattr(self, name), tuple) and named
        }

    def find_key(self, role: str) -> str:
        """Return the key of a role."""
        return role.replace("-", "_")


class HostsConfig(Section):
    """Machines that one `relax run` starts the workers of a run on; with none, its own.

    Each has this package, the model's folder and the working directory under the same paths, and
    as many GPUs as the others. The devices of all hosts are numbered through, in the order of
    `addresses`.
    """

    addresses: Addresses = ()
    """By which the hosts reach each other, the machine of `relax run` first; `--hosts a,b` sets
    them. The roles that hold no model run on the first."""
    command: Program = (
        "ssh",
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"),
        HOST,
    )
    """Runs a shell's command line, its last argument, on another host, with this one's stdin and
    stdout; `{host}` stands for the host's address."""
    rendezvous_port: Annotated[int, Field(ge=1, le=65_534)] = 29_500
    """Port of the trainer's rank 0 for its other ranks; the critic's is the next one."""

    @property
    def num_hosts(self) -> int:
        """How many machines the run is on."""
        return max(len(self.addresses), 1)
