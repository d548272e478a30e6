"""Which worker computes on which device of a machine. A pure function of the workers and the number
of devices; the supervisor shows each process its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from relax_events.config.devices import DevicesConfig
from relax_events.errors import ConfigError
from relax_events.planning.inventory import COMPUTING_ROLES

LOADS = {"rollout": 4, "evaluator": 2, "critic": 4, "judge": 4, "teacher": 2}
"""How much a worker of a role computes, compared with a scoring worker: engines generate,
and the critic learns."""

TRAINER, CRITIC = "trainer-", "critic-"
Placement = Mapping[str, tuple[int, ...]]
"""Devices by worker id, `rollout-0`; ranks are workers of their own, `trainer-1`."""


def place_workers(
    roles: Mapping[str, int],
    *,
    ranks: int,
    num_devices: int,
    devices: DevicesConfig,
    sizes: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    """Return the devices of each worker that holds a model.

    Each rank of the trainer gets a device of its own. The other workers share the rest, in order of
    falling work, each where least is computed; they share with the trainer only where too few are
    left. No two ranks of the critic share a device. A role that `devices` names stays on
    its devices.

    Args:
        roles: Number of workers by role; the critic counts as its ranks.
        ranks: Of the trainer.
        num_devices: Of the machine.
        devices: The section `devices`.
        sizes: How many devices a worker computes on, by role; one where a role is left out.
    Raises:
        ConfigError: There are fewer devices than ranks, or than a worker computes on, or a device
            is named that is not there.
    """
    for role, named in devices.by_role().items():
        if missing := [index for index in named if index >= num_devices]:
            raise ConfigError(
                f"devices.{devices.find_key(role)} names device {missing[0]}, and there are "
                f"{num_devices}, from 0 on; name others, or leave it out"
            )
    trained = devices.by_role().get("trainer") or tuple(range(min(ranks, num_devices)))
    num_ranks = ranks if "trainer" in roles else 0
    if num_ranks > len(trained):
        raise ConfigError(
            f"trainer.ranks is {ranks}, and the trainer has {len(trained)} device(s); set "
            f"trainer.ranks = {len(trained)}, or give it more devices"
        )
    placed: dict[str, tuple[int, ...]] = {
        f"{TRAINER}{rank}": (trained[rank],) for rank in range(num_ranks)
    }
    num_devices_of_critic = len(devices.critic) or num_devices
    if roles.get("critic", 0) > num_devices_of_critic:
        raise ConfigError(
            f"the critic has {roles['critic']} ranks, each on a device of its own, and there are "
            f"{num_devices_of_critic}; set critic.ranks = {num_devices_of_critic}, or give it more "
            "devices"
        )
    workers = [(role, index) for role in COMPUTING_ROLES for index in range(roles.get(role, 0))]
    workers.sort(key=lambda worker: -_load(worker[0]))
    for role, index in workers:
        placed[f"{role}-{index}"] = place_worker(
            role,
            index,
            placed,
            num_devices=num_devices,
            devices=devices,
            size=sizes.get(role, 1),
        )
    return placed


def place_worker(
    role: str,
    index: int,
    placed: Placement,
    *,
    num_devices: int,
    devices: DevicesConfig,
    size: int,
) -> tuple[int, ...]:
    """Return the devices of one more worker, in rising order where none are named.

    Args:
        role: Of the worker.
        index: Among the workers of its role; it deals them out over devices that were named.
        placed: The others.
        num_devices: Of the machine.
        devices: The section `devices`.
        size: How many devices the worker computes on.
    Raises:
        ConfigError: There are fewer devices, or fewer are named.
    """
    if named := devices.by_role().get(role):
        if len(named) < size:
            raise ConfigError(
                f"a worker of role {role} computes on {size} GPUs, by the arguments of its "
                f"engine, and devices.{devices.find_key(role)} names {len(named)}; name {size}, or "
                "lower --tp-size"
            )
        return tuple(named[(index * size + number) % len(named)] for number in range(size))
    trained = _list_devices(placed, TRAINER)
    peers = _list_devices(placed, CRITIC) if role == "critic" else set()
    left = [device for device in range(num_devices) if device not in peers]
    free = [device for device in left if device not in trained]
    if len(left) < size:
        raise ConfigError(
            f"a worker of role {role} computes on {size} GPUs, by the arguments of its engine, and "
            f"there are {len(left)}; lower --tp-size, or take a machine with more"
        )
    loads = Counter[int]()
    for worker, where in placed.items():
        loads.update(dict.fromkeys(where, _load(worker.rpartition("-")[0])))
    chosen = free if len(free) >= size else left
    return tuple(sorted(sorted(chosen, key=lambda device: (loads[device], device))[:size]))


def _list_devices(placed: Placement, prefix: str) -> set[int]:
    return {
        device for worker, where in placed.items() if worker.startswith(prefix) for device in where
    }


def _load(role: str) -> int:
    return LOADS.get(role, 1)
