"""The embedded broker's `server.properties`: one node on one machine, with a fast start and
recovery.
"""

from collections.abc import Mapping
from pathlib import Path

from relax_events.errors import ConfigError
from relax_events.kafka.embedded.java import MIN_HEAP_MIB, compute_request_bytes
from relax_events.kafka.embedded.security import NodeLogin, NodeSecurity
from relax_events.kafka.embedded.storage import NODE_ID

_MIB = 1 << 20
_HOUR_MILLISECONDS = 3_600_000
SHARE_GROUP_SIZE = 1000
"""The maximal number of members of a share group."""

_NODE = {
    "process.roles": "broker,controller",
    "node.id": NODE_ID,
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
}
_SESSION = {
    # After a kill a node waits until its old session expires: 11.6 s with the defaults of 9000 and
    # 2000. A session of 1000 expires on a busy machine although the node lives: the controller then
    # briefly sees no broker, and rejects topics and leaders.
    "broker.session.timeout.ms": 4000,
    "broker.heartbeat.interval.ms": 200,
}
_TOPICS = {
    "auto.create.topics.enable": "false",
    "delete.topic.enable": "true",
    "num.partitions": 1,
    "default.replication.factor": 1,
    "min.insync.replicas": 1,
    "message.max.bytes": 64 * _MIB,
    "log.message.timestamp.type": "LogAppendTime",
    # The cleaner's default buffer of 128 MiB would be a quarter of the heap.
    "log.cleaner.dedupe.buffer.size": 4 * _MIB,
    "log.cleaner.threads": 1,
    # Purged files are deleted within 30 s instead of five minutes.
    "log.retention.check.interval.ms": 30_000,
}
# One partition each: the first group, transaction or share group waits for the creation of its
# topic, which has fifty partitions by default.
_INTERNAL_TOPICS = {
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    # Only closed segments are compacted or deleted: with small ones these topics stay small instead
    # of growing to 100 MiB each.
    "offsets.topic.segment.bytes": 4 * _MIB,
    "transaction.state.log.segment.bytes": 4 * _MIB,
    "share.coordinator.state.topic.segment.bytes": 4 * _MIB,
}
# The minima bound an application's group configs; the other values are the defaults of new groups.
_GROUPS = {
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1000,
    "group.consumer.min.session.timeout.ms": 3000,
    "group.consumer.session.timeout.ms": 6000,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.consumer.heartbeat.interval.ms": 500,
    "group.share.min.session.timeout.ms": 3000,
    "group.share.session.timeout.ms": 6000,
    "group.share.min.heartbeat.interval.ms": 500,
    "group.share.heartbeat.interval.ms": 1500,
    "group.share.min.record.lock.duration.ms": 1000,
    "group.share.max.record.lock.duration.ms": _HOUR_MILLISECONDS,
    # Each share consumer of a rollout worker is a member. The default is 200 members; Kafka's
    # maximum is 1000.
    "group.share.max.size": SHARE_GROUP_SIZE,
    # Each member of all runs on this broker has a share session; without free slots, sessions are
    # recreated at every fetch.
    "group.share.max.share.sessions": 4000,
    "max.incremental.fetch.session.cache.slots": 4000,
    "group.share.partition.max.record.locks": 10_000,
    "group.share.max.partition.max.record.locks": 10_000,
    "transaction.max.timeout.ms": 900_000,
}
_OWN_KEYS = frozenset(
    {
        *_NODE,
        "listeners",
        "advertised.listeners",
        "controller.quorum.voters",
        "log.dirs",
        "log.dir",
        "metadata.log.dir",
        "super.users",
    }
)


def build_server_properties(
    data: Path,
    *,
    port: int,
    controller_port: int,
    overrides: Mapping[str, str],
    heap_mib: int = MIN_HEAP_MIB,
    security: NodeSecurity | NodeLogin | None = None,
) -> str:
    """Return the text of `server.properties`.

    Args:
        data: The formatted log folder.
        port: The clients' port on the loopback interface.
        controller_port: The port of the node's own controller.
        overrides: Broker settings that override these.
        heap_mib: The process's heap in MiB, which bounds the bytes of pending requests.
        security: Authentication and authorization; without it every user of this machine may do
            everything.
    Raises:
        ConfigError: An override sets a property that the embedded broker controls (addresses,
            folders, identity), or the folder's name contains a comma.
    """
    refused = sorted(_OWN_KEYS & overrides.keys())
    if refused:
        raise ConfigError(
            f"node_properties must not set {', '.join(refused)}: the embedded broker "
            "controls it; start your own broker for that"
        )
    if "," in str(data):
        raise ConfigError(
            f"the broker's directory must not contain a comma, got {str(data)!r}: Kafka reads "
            "log.dirs as a list"
        )
    addresses = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller_port}",
        "log.dirs": str(data),
    }
    secured = (
        {} if security is None else security.properties(port=port, controller_port=controller_port)
    )
    held = {"queued.max.request.bytes": compute_request_bytes(heap_mib)}
    settings = {
        **_NODE,
        **_SESSION,
        **_TOPICS,
        **_INTERNAL_TOPICS,
        **_GROUPS,
        **held,
        **addresses,
        **secured,
        **overrides,
    }
    return "".join(
        f"{escape_property(key)}={escape_property(str(value))}\n" for key, value in settings.items()
    )


def escape_property(text: str) -> str:
    """Escape a key or value for Java's `Properties` format."""
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(
        chr(code) if 0x20 < code < 0x7F and code != 0x5C else f"\\u{code:04x}" for code in codes
    )
