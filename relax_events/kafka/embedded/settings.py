"""The embedded broker's `server.properties`: settings for one node on one machine, quick to start
and to recover.
"""

from collections.abc import Mapping
from pathlib import Path

from relax_events.errors import ConfigError
from relax_events.kafka.embedded.java import LEAST_MIB, request_bytes
from relax_events.kafka.embedded.security import NodeLogin, NodeSecurity
from relax_events.kafka.embedded.storage import NODE_ID

_MIB = 1 << 20
_HOUR_MILLISECONDS = 3_600_000
SHARE_GROUP_SIZE = 1000
"""Members that a share group may have."""

_NODE = {
    "process.roles": "broker,controller",
    "node.id": NODE_ID,
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
}
_SESSION = {
    # After a kill a node waits for its old session to lapse, with the defaults 9000 and 2000 for
    # 11.6 s. A session of 1000 ends on a busy machine though the node lives: for a moment the
    # controller then counts no broker, and refuses topics and leaders.
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
    # The cleaner's default buffer is 128 MiB of heap, a quarter of all there is.
    "log.cleaner.dedupe.buffer.size": 4 * _MIB,
    "log.cleaner.threads": 1,
    # Purged files leave the disk within half a minute instead of five.
    "log.retention.check.interval.ms": 30_000,
}
# One partition each: the first group, transaction or share group waits for its topic to be made,
# fifty partitions by default.
_INTERNAL_TOPICS = {
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    # Only closed files are compacted or pruned: these topics stay within a few of them instead of
    # growing to 100 MiB each.
    "offsets.topic.segment.bytes": 4 * _MIB,
    "transaction.state.log.segment.bytes": 4 * _MIB,
    "share.coordinator.state.topic.segment.bytes": 4 * _MIB,
}
# The minima are what an application may ask for by group configs; the plain values are what a new
# group gets.
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
    "group.share.heartbeat.interval.ms": 500,
    "group.share.min.record.lock.duration.ms": 1000,
    "group.share.max.record.lock.duration.ms": _HOUR_MILLISECONDS,
    # Each lane of a rollout worker is a member, and 200 members are allowed by default; 1000 is the
    # most that Kafka takes.
    "group.share.max.size": SHARE_GROUP_SIZE,
    # Each member has a share session, of all runs on this broker; where slots are out, sessions are
    # made anew at every fetch.
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


def server_properties(
    data: Path,
    *,
    port: int,
    controller_port: int,
    overrides: Mapping[str, str],
    heap_mib: int = LEAST_MIB,
    security: NodeSecurity | NodeLogin | None = None,
) -> str:
    """Return the text of `server.properties`.

    Args:
        data: The formatted log folder.
        port: Where clients connect, on the loopback interface.
        controller_port: Where the node talks to its own controller.
        overrides: Further broker settings, laid over these.
        heap_mib: Of the process, in MiB: what it holds of requests follows from it.
        security: Who may connect and do what; without it everyone on this machine may do
            everything.
    Raises:
        ConfigError: An override touches what the embedded broker decides (addresses, folders,
            identity), or the folder's name holds a comma.
    """
    refused = sorted(_OWN_KEYS & overrides.keys())
    if refused:
        raise ConfigError(
            f"node_properties must not set {', '.join(refused)}: the embedded broker decides "
            "it; start your own broker for that"
        )
    if "," in str(data):
        raise ConfigError(
            f"the broker's directory must not hold a comma, got {str(data)!r}: Kafka reads "
            "log.dirs as a list"
        )
    places = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller_port}",
        "log.dirs": str(data),
    }
    secured = (
        {} if security is None else security.properties(port=port, controller_port=controller_port)
    )
    held = {"queued.max.request.bytes": request_bytes(heap_mib)}
    settings = {
        **_NODE,
        **_SESSION,
        **_TOPICS,
        **_INTERNAL_TOPICS,
        **_GROUPS,
        **held,
        **places,
        **secured,
        **overrides,
    }
    return "".join(f"{escape(key)}={escape(str(value))}\n" for key, value in settings.items())


def escape(text: str) -> str:
    """Return a key or value as Java's `Properties` reads it back: Latin-1 text in which a backslash
    escapes.
    """
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(
        chr(code) if 0x20 < code < 0x7F and code != 0x5C else f"\\u{code:04x}" for code in codes
    )
