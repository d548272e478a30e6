"""What workers need of partitions, processes and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_events.config.addresses import EMBEDDED, is_loopback
from relax_events.config.devices import HOST

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig


ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""A host's name or number: no option of a program, and no path."""


def check_partitions(config: RunConfig) -> Iterator[str]:
    """Give workers or ranks that have no partition to read."""
    workers, partitions = config.workers.rollout, config.broker.queue_partitions
    if config.broker.prompt_queue == "consumer_group" and workers > partitions:
        yield (
            f"a worker without a partition gets no prompts: workers.rollout = {workers} needs "
            f"broker.queue_partitions >= {workers}, got {partitions}; set "
            "broker.queue_partitions or workers.rollout"
        )
    ranks = config.trainer.topology().data
    if ranks > config.broker.partitions_per_version:
        yield (
            f"every data-parallel rank reads shards of its own: trainer.ranks = "
            f"{config.trainer.ranks} needs broker.partitions_per_version >= {ranks}, got "
            f"{config.broker.partitions_per_version}; set broker.partitions_per_version or "
            "trainer.ranks"
        )


def check_hybrid(config: RunConfig) -> Iterator[str]:
    """Give workers of two roles that can't be paired in one process."""
    roles = config.roles()
    for pair in config.hosted_pairs():
        first, second = (f"workers.{role.replace('-', '_')}" for role in pair)
        if roles[pair[0]] != roles[pair[1]]:
            yield (
                f"workers.hybrid = true pairs their processes, and {first} = {roles[pair[0]]} is "
                f"not {second} = {roles[pair[1]]}; set both to the same number"
            )
    if config.workers.hybrid and config.broker.credentials is not None:
        yield (
            "workers.hybrid = true has two roles in one process, and broker.credentials gives each "
            "role a user of its own; set workers.hybrid = false"
        )


def check_hosts(config: RunConfig) -> Iterator[str]:
    """Give why the hosts of a run can't reach each other or its broker."""
    addresses, command = config.hosts.addresses, config.hosts.command
    if not addresses:
        return
    key = f"hosts.addresses = {list(addresses)}"
    if colons := [one for one in addresses if ":" in one]:
        yield (
            f"{key} names {colons[0]!r}, and ranks of several hosts meet by IPv4, at "
            "hosts.rendezvous_port; give names or IPv4 addresses, without ports"
        )
    elif wrong := [one for one in addresses if not ADDRESS.fullmatch(one) or is_loopback(one)]:
        yield (
            f"{key} names {wrong[0]!r}, by which no other host reaches it; give names or addresses "
            "in your network"
        )
    if len(set(addresses)) < len(addresses):
        yield f"{key} names a host twice; name each once"
    if config.broker.bootstrap_servers == EMBEDDED:
        yield (
            f"{key}, and the embedded broker listens on the loopback address alone; set "
            "broker.bootstrap_servers to brokers that all hosts reach"
        )
    if not any(HOST in word for word in command):
        yield f'hosts.command names no host; write "{HOST}" where its address belongs'


def check_time_share(config: RunConfig) -> Iterator[str]:
    """Give why trainer and engines can't take turns on a device."""
    if config.devices.time_share:
        for problem in _find_time_share_problems(config):
            yield f"devices.time_share = true {problem}, or set devices.time_share = false"


def _find_time_share_problems(config: RunConfig) -> Iterator[str]:
    run, engine = config.run, config.rollout_engine
    if config.is_replay:
        yield "shares devices with engines, and a replay has none; leave it out"
        return
    if run.mode != "sync" and engine == "sglang":
        yield (
            f"with run.mode = {run.mode!r} takes the device from requests that run, which an "
            "SGLang server does not survive; set run.mode = 'sync' and run.max_staleness = 0"
        )
    if run.mode != "sync" and config.workers.hybrid:
        yield (
            f"with run.mode = {run.mode!r} and workers.hybrid = true would take the device from "
            "the engines for each sample that is scored; set workers.hybrid = false"
        )
    if engine not in ("transformers", "sglang"):
        yield (
            f"needs an engine that frees its memory, and that of the rollout workers is "
            f"{engine!r}; set engine.name to 'transformers' or 'sglang'"
        )
    if engine == "sglang" and config.engine.sglang.urls:
        yield (
            "needs servers that rollout workers start, and engine.sglang.urls names running ones; "
            "leave it out"
        )
    if config.weights.transport == "nccl":
        yield (
            "frees the devices between which weights.transport = 'nccl' sends; set "
            "weights.transport = 'store'"
        )
