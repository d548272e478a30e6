"""Opens the transport by which policy versions travel, as the section `weights` says. What `store`
alone needs loads no torch.
"""

from __future__ import annotations

from relax_events.events.types import EnginesEnlisted
from relax_events.objects import ObjectStore
from relax_events.runtime.worker import Worker
from relax_events.weights.transport import StoreTransport, NullWeightsReader, WeightsTransport


def open_weights_publisher(worker: Worker, store: ObjectStore) -> WeightsTransport:
    """Open the trainer's side, for engines to join; only the one trainer of a run may have it.

    Raises:
        EnvironmentProblem: This machine has not what the transport needs.
    """
    config = worker.config.weights
    if config.transport == "store":
        return StoreTransport(store, full_snapshot_interval=config.full_snapshot_interval)
    from relax_events.weights.broadcast.sender import Broadcaster
    from relax_events.weights.broadcast.transports import BroadcastPublisher

    def announce(enlisted: EnginesEnlisted) -> None:
        worker.producer.send(worker.outbound("control.engines", enlisted, key="engines"))

    last = worker.control.enlisted
    broadcaster = Broadcaster(
        config,
        metrics=worker.metrics.weights,
        announce=announce,
        last_list=last.list_version if last else 0,
    )
    return BroadcastPublisher(store, broadcaster)


def open_weights_reader(worker: Worker, store: ObjectStore) -> WeightsTransport:
    """Open a rollout worker's side."""
    config = worker.config
    if not config.algorithm.has_rewards:
        return NullWeightsReader()
    if config.weights.transport == "store":
        return StoreTransport(store, full_snapshot_interval=config.weights.full_snapshot_interval)
    from relax_events.weights.broadcast.receiver import Receiver
    from relax_events.weights.broadcast.transports import BroadcastReader

    return BroadcastReader(
        store, Receiver(worker.worker_id, config.weights, metrics=worker.metrics.weights)
    )
