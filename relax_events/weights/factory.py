"""Opens the transport of policy versions that the section `weights` names. For `store` alone no
torch is imported.
"""

from __future__ import annotations

from relax_events.events.types import BroadcastMembership
from relax_events.models.base_digest import compute_base_digest
from relax_events.objects import ObjectStore
from relax_events.runtime.worker import Worker
from relax_events.topics.names import BROADCAST
from relax_events.weights.transport import (
    NullWeightsReader,
    StorePublisher,
    StoreReader,
    WeightsPublisher,
    WeightsReader,
)


def open_weights_publisher(worker: Worker, store: ObjectStore) -> WeightsPublisher:
    """Open the trainer's side; only the one trainer of a run may do so.

    Raises:
        EnvironmentProblem: This machine lacks a requirement of the transport.
    """
    config, model = worker.config.weights, worker.config.model
    base_digest = compute_base_digest(model.path) if model.lora is not None else b""
    if config.transport == "store":
        return StorePublisher(
            store, full_snapshot_interval=config.full_snapshot_interval, base_digest=base_digest
        )
    from relax_events.weights.broadcast.sender import Broadcaster
    from relax_events.weights.broadcast.transports import BroadcastPublisher

    def announce(enlisted: BroadcastMembership) -> None:
        worker.records.producer.send(worker.records.build(BROADCAST, enlisted, key="engines"))

    last = worker.control.follower.broadcast_membership
    broadcaster = Broadcaster(
        config,
        metrics=worker.metrics.weights,
        announce=announce,
        last_list=last.membership_version if last else 0,
    )
    return BroadcastPublisher(store, broadcaster, base_digest=base_digest)


def open_weights_reader(worker: Worker, store: ObjectStore) -> WeightsReader:
    """Open the side of a worker that loads versions as the trainer publishes them."""
    config = worker.config
    if not config.algorithm.has_rewards:
        return NullWeightsReader()
    if config.weights.transport == "store":
        return StoreReader(store, full_snapshot_interval=config.weights.full_snapshot_interval)
    from relax_events.weights.broadcast.receiver import Receiver
    from relax_events.weights.broadcast.transports import BroadcastReader

    return BroadcastReader(
        store, Receiver(worker.worker_id, config.weights, metrics=worker.metrics.weights)
    )
