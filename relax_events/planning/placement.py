"""Which worker computes on which device of which machine. A pure function of the workers and the
number of devices; the supervisor shows each process its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
    num_hosts: int = 1,
) -> dict[str, tuple[int, ...]]:
    """Return the devices of each worker that holds a model.

    Each rank of the trainer gets a device of its own. The other workers share the rest, in order of
    falling work, each where least is computed; they share with the trainer only where too few are
    left. No two ranks of the critic share a device. A role that `devices` names stays on
    its devices.

    Args:
        roles: Number of workers by role; the critic counts as its ranks.
        ranks: Of the trainer.
        num_devices: Of all machines.
        devices: The section `devices`.
        sizes: How many devices a worker computes on, by role; one where a role is left out.
        num_hosts: Machines with equal shares of the devices; a worker's are all on one of them.
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
            num_hosts=num_hosts,
        )
    return placed


def share_among_hosts(
    placed: Placement, *, num_devices: int, num_hosts: int
) -> Sequence[Placement]:
    """Return the workers of each host, with their devices counted from the host's first.

    Args:
        placed: Devices of all workers that hold a model.
        num_devices: Of all hosts.
        num_hosts: With equal shares of the devices.
    Raises:
        ConfigError: A worker's devices are on several hosts.
    """
    share = num_devices // num_hosts
    hosts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_hosts)]
    for worker_id, where in placed.items():
        if len({device // share for device in where}) > 1:
            raise ConfigError(
                f"devices.{worker_id.rpartition('-')[0].replace('-', '_')} gives {worker_id} the "
                f"devices {list(where)}, which are on several hosts of {share}; name others"
            )
        hosts[where[0] // share][worker_id] = tuple(device % share for device in where)
    return hosts


def place_worker(
    role: str,
    index: int,
    placed: Placement,
    *,
    num_devices: int,
    devices: DevicesConfig,
    size: int,
    num_hosts: int = 1,
) -> tuple[int, ...]:
    """Return the devices of one more worker, in rising order where none are named.

    Args:
        role: Of the worker.
        index: Among the workers of its role; it deals them out over devices that were named.
        placed: The others.
        num_devices: Of all machines.
        devices: The section `devices`.
        size: How many devices the worker computes on.
        num_hosts: As for `place_workers`.
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
    loads = Counter[int]()
    for worker, where in placed.items():
        loads.update(dict.fromkeys(where, _load(worker.rpartition("-")[0])))
    share = num_devices // num_hosts
    for candidates in (free, left):
        by_load = sorted(candidates, key=lambda device: (loads[device], device))
        whole = [
            local[:size]
            for host in range(num_hosts)
            if len(local := [device for device in by_load if device // share == host]) >= size
        ]
        if whole:
            least = min(whole, key=lambda local: _weigh(local, loads, share))
            return tuple(sorted(least))
    raise ConfigError(
        f"a worker of role {role} computes on {size} GPUs, by the arguments of its engine, and "
        f"there are {len(left) // num_hosts}; lower --tp-size, or take a machine with more"
    )


def _weigh(
    local: Sequence[int], loads: Mapping[int, int], share: int
) -> tuple[int, int, Sequence[int]]:
    """Return by what devices of a host are chosen: their load, and that of the whole host."""
    host = local[0] // share
    on_host = sum(load for device, load in loads.items() if device // share == host)
    return sum(loads[one] for one in local), on_host, local


def _list_devices(placed: Placement, prefix: str) -> set[int]:
    return {
        device for worker, where in placed.items() if worker.startswith(prefix) for device in where
    }


def _load(role: str) -> int:
    return LOADS.get(role, 1)
