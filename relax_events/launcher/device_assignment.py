"""Gives each host its workers, and shows each worker the GPUs on which it is to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
import structlog

from relax_events.config import RunConfig
from relax_events.config.devices import DevicesConfig
from relax_events.config.engine import read_argument
from relax_events.planning.inventory import COMPUTING_ROLES
from relax_events.planning.placement import (
    Placement,
    place_worker,
    place_workers,
    share_among_hosts,
)
from relax_events.session.gpus import VISIBLE, find_gpus
from relax_events.session.planned import plan_engine_shares

log = structlog.get_logger()
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The order of `nvidia-smi`, which CUDA's own need not be."""
MEMORY_FRACTION = "--mem-fraction-static"
"""Share of a GPU for a server's weights and cache."""
ON_GPUS = ("auto", "cuda")


class DeviceAssignment:
    """The GPUs of a run's workers on this machine; without GPUs, or where `model.device` names one
    device, it changes nothing.

    A worker that holds a model sees its own GPU alone, one with an engine over several GPUs
    all of them; the ranks of the trainer all see the trainer's, each its own at `LOCAL_RANK`, and
    so do the ranks of the critic. Other workers see all GPUs: a reward function may want one.
    """

    def __init__(
        self,
        config: RunConfig,
        names: Sequence[str],
        shares: Mapping[str, float] | None = None,
        *,
        host: int = 0,
    ) -> None:
        """Assign devices to the workers that the run starts with.

        Args:
            config: The run.
            names: Of the GPUs, as in `CUDA_VISIBLE_DEVICES`; every host has as many.
            shares: Of a GPU's memory, by worker with an engine that has no GPU to itself.
            host: This machine, among those of `hosts.addresses`.
        Raises:
            ConfigError: The trainer has more ranks than there are GPUs, or `devices` names a
                GPU that is not there.
        """
        self._names = tuple(names) if config.model.device in ON_GPUS else ()
        self._devices = config.devices
        self._host, self._hosts = host, _share_workers(config, len(self._names))
        self._ranks = {"trainer": config.trainer.ranks, "critic": config.critic_ranks}
        self._sizes, self._shares = config.engine_devices(), dict(shares or {})
        self._engines = {"judge": ("judge.engine", config.judge.engine)} | dict.fromkeys(
            ("rollout", "evaluator"), ("engine", config.engine)
        )
        self._placed: dict[str, tuple[int, ...]] = {}
        if self._names:
            self._placed = dict(self._hosts[host])
            if len(self._hosts) > 1:
                self._devices = DevicesConfig()  # an elastic worker takes one of this machine
            log.info(
                "devices.placed",
                **{worker: self._name(devices) for worker, devices in sorted(self._placed.items())},
            )

    @classmethod
    def of_machine(cls, config: RunConfig, *, host: int = 0) -> DeviceAssignment:
        """Assign to the workers the GPUs that this process may use; see `__init__`."""
        gpus = find_gpus()
        shares = plan_engine_shares(config) if gpus and config.model.device in ON_GPUS else {}
        return cls(config, [gpu.name for gpu in gpus], shares, host=host)

    def list_indices(self, role: str, count: int) -> list[int]:
        """Return which workers or ranks of a role are on this host, of so many on all."""
        return [index for index in range(count) if self.find_host(f"{role}-{index}") == self._host]

    def find_host(self, worker_id: str) -> int:
        """Return the host of a worker that the run starts with; the first for one without a
        model.
        """
        return next((at for at, placed in enumerate(self._hosts) if worker_id in placed), 0)

    def variables(self, role: str, index: int) -> dict[str, str]:
        """Return the environment variables of a worker; an elastic one is placed by the load of
        the devices that the trainer leaves.
        """
        if not self._names or role not in (*COMPUTING_ROLES, "trainer"):
            return {}
        # each rank has a device of its own, at LOCAL_RANK
        indices = self.list_indices(role, self._ranks[role]) if role in self._ranks else [index]
        seen = [device for one in indices for device in self._assign(role, one)]
        return {VISIBLE: self._name(seen)} | ORDER

    def overrides(self, role: str, index: int) -> list[str]:
        """Return what a worker's run file has to say in addition: the share of the memory that its
        servers take of a GPU which other workers use, too. SGLang takes nearly all of it otherwise.
        """
        planned = [
            share for worker, share in self._shares.items() if worker.rpartition("-")[0] == role
        ]
        if not planned:
            return []
        key, engine = self._engines[role]
        arguments = engine.sglang.arguments
        is_chosen = read_argument(arguments, MEMORY_FRACTION) is not None
        if not engine.starts_servers or is_chosen:
            return []
        share = self._shares.get(f"{role}-{index}", min(planned))
        longer = [*arguments, MEMORY_FRACTION, f"{share:.3f}"]
        return [f"{key}.sglang.arguments={orjson.dumps(longer).decode()}"]

    def _assign(self, role: str, index: int) -> tuple[int, ...]:
        worker_id = f"{role}-{index}"
        if worker_id not in self._placed:
            devices = place_worker(
                role,
                index,
                self._placed,
                num_devices=len(self._names),
                devices=self._devices,
                size=self._sizes.get(role, 1),
            )
            self._placed[worker_id] = devices
            log.info("devices.placed", **{worker_id: self._name(devices)})
        return self._placed[worker_id]

    def _name(self, devices: Sequence[int]) -> str:
        return ",".join(self._names[device] for device in devices)

    def release(self, worker_id: str) -> None:
        """Forget an elastic worker that has left."""
        self._placed.pop(worker_id, None)


def _share_workers(config: RunConfig, num_gpus: int) -> Sequence[Placement]:
    """Return the workers with a model of each host. Without GPUs each host has a place for as many
    ranks as another.
    """
    num_hosts = config.hosts.num_hosts
    most = max(config.trainer.ranks, config.critic_ranks)
    share = num_gpus or -(-most // num_hosts)
    placed = place_workers(
        config.separate_processes(),
        ranks=config.trainer.ranks,
        num_devices=share * num_hosts,
        devices=config.devices if num_gpus else DevicesConfig(),
        sizes=config.engine_devices() if num_gpus else {},
        num_hosts=num_hosts,
    )
    return share_among_hosts(placed, num_devices=share * num_hosts, num_hosts=num_hosts)
