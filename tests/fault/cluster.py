"""A cluster of three nodes on this machine: three copies of everything, two of which must have a record before it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from node import Node, choose_ports

from relax_events.broker.admin import Admin
from relax_events.broker.connection import Connection
from relax_events.broker.embedded.ports import HOST
from relax_events.broker.embedded.storage import new_id

NUM_NODES = 3
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
}
FAST_FAILOVER = {
    # A leader is missed for 3 to 4 s instead of the 8 to 10 s of the defaults.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.timeout.ms": "500",
}


class Cluster:
    """Three combined nodes with static voters. It is used where a run has an embedded broker."""

    def __init__(self, directory: Path) -> None:
        ports = choose_ports(2 * NUM_NODES)
        voters = ",".join(f"{number + 1}@{HOST}:{ports[NUM_NODES + number]}" for number in range(NUM_NODES))
        cluster_id = new_id()
        self.nodes = {
            number + 1: Node(
                directory / f"node-{number + 1}",
                port=ports[number],
                controller_port=ports[NUM_NODES + number],
                properties={"node.id": str(number + 1), "controller.quorum.voters": voters, **REPLICATED, **FAST_FAILOVER},
                node_id=number + 1,
                cluster_id=cluster_id,
            )
            for number in range(NUM_NODES)
        }

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
            return next(state.leader for state in admin.partitions(topic) if (state.topic, state.partition) == (topic, 0))
        finally:
            admin.close()

    def is_whole(self, prefix: str) -> bool:
        """Tell whether every node has every record of the topics whose names begin so."""
        admin = Admin(Connection(self.bootstrap_servers))
        try:
            return all(len(state.in_sync) == NUM_NODES for state in admin.partitions(prefix))
        finally:
            admin.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()
