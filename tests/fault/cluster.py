"""A cluster of three nodes on this machine, with replication factor 3 and min.insync.replicas 2.

The nodes reach each other over links only, so that one can be cut off from the other two while all
clients still reach it.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import psutil
from link import Link
from node import Node, choose_ports

from benchmarks.three_brokers import REPLICATED
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded.ports import HOST
from relax_events.kafka.embedded.storage import create_id

NUM_NODES = 3
FAST_FAILOVER = {
    # A leader is missed for 3 to 4 s instead of the 8 to 10 s of the defaults.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.timeout.ms": "500",
}


class Cluster:
    """Three combined nodes with static voters. It replaces a run's embedded broker. Clients
    connect without login."""

    password_file: Path | None = None

    def __init__(self, directory: Path) -> None:
        client_ports, inner_ports, controller_ports, inner_link_ports, controller_link_ports = (
            dict(zip(range(1, NUM_NODES + 1), ports, strict=True))
            for ports in grouped(choose_ports(5 * NUM_NODES))
        )
        voters = ",".join(
            f"{number}@{HOST}:{port}" for number, port in controller_link_ports.items()
        )
        cluster_id = create_id()
        self._cut_off: int | None = None
        self._stack = ExitStack()
        self._links: list[Link] = []
        self.nodes: dict[int, Node] = {}
        for number, port in client_ports.items():
            admits = partial(self._admits, number)
            inner = Link(inner_ports[number], port=inner_link_ports[number], admits=admits)
            controller = Link(
                controller_ports[number], port=controller_link_ports[number], admits=admits
            )
            self._links += [inner, controller]
            listeners = f"PLAINTEXT://{HOST}:{port},INNER://{HOST}:{inner.target_port},CONTROLLER://{HOST}:{controller.target_port}"
            advertised = f"PLAINTEXT://{HOST}:{port},INNER://{HOST}:{inner.port},CONTROLLER://{HOST}:{controller.port}"
            layout = {
                "node.id": str(number),
                "controller.quorum.voters": voters,
                "listeners": listeners,
                "advertised.listeners": advertised,
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,INNER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
                "inter.broker.listener.name": "INNER",
            }
            self.nodes[number] = Node(
                directory / f"node-{number}",
                port=port,
                controller_port=controller.target_port,
                properties={**layout, **REPLICATED, **FAST_FAILOVER},
                node_id=number,
                cluster_id=cluster_id,
            )

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect."""
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    def start(self) -> None:
        """Start the nodes that don't run, together, since none serves alone."""
        for node in self.nodes.values():
            node.spawn()
        for node in self.nodes.values():
            node.start()

    def leader(self, topic: str) -> int:
        """Return which node leads a topic's first partition."""
        admin = Admin(Connection(self.bootstrap_servers))
        try:
            return next(
                state.leader
                for state in admin.partitions(topic)
                if (state.topic, state.partition) == (topic, 0)
            )
        finally:
            admin.close()

    def is_whole(self, prefix: str) -> bool:
        """Tell whether every node has every record of the topics whose names begin so."""
        admin = Admin(Connection(self.bootstrap_servers))
        try:
            return all(len(state.in_sync) == NUM_NODES for state in admin.partitions(prefix))
        finally:
            admin.close()

    def cut_off(self, number: int) -> None:
        """Drop all traffic between one node and the other two, without closing connections."""
        self._cut_off = number
        self._reset()

    def reunite(self) -> None:
        """Carry everything again."""
        self._cut_off = None
        self._reset()

    def _reset(self) -> None:
        for link in self._links:
            link.reset()

    def _admits(self, target: int, client_port: int) -> bool:
        """Tell whether the node at the other end of a connection is on the same side of the cut as
        its target."""
        if self._cut_off is None:
            return True
        client = next(
            (number for number, node in self.nodes.items() if holds_port(node, client_port)), None
        )
        return client is not None and (client == self._cut_off) == (target == self._cut_off)

    def __enter__(self) -> Self:
        for link in self._links:
            self._stack.enter_context(link)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()
        self._stack.close()


def grouped(ports: list[int]) -> list[list[int]]:
    """Lay ports out in groups of one for each node."""
    return [ports[start : start + NUM_NODES] for start in range(0, len(ports), NUM_NODES)]


def holds_port(node: Node, port: int) -> bool:
    """Tell whether a connection of a node's process has this local port."""
    try:
        return node.pid is not None and any(
            connection.laddr.port == port
            for connection in psutil.Process(node.pid).net_connections("tcp")
            if connection.laddr
        )
    except psutil.NoSuchProcess:
        return False
