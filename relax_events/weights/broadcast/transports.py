"""The transports `gloo` and `nccl`: the store has every version, and the engines that are present
are sent it besides.

A version is sent while it is written to the store, and served once its record is on the log, by its
digests in the artifact's manifest: an engine can't tell by which way its weights came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from relax_events.events.parts import ObjectRef
from relax_events.events.types import EnginesEnlisted, Event, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.weights.artifact_writer import transit_digest
from relax_events.weights.broadcast.receiver import Receiver
from relax_events.weights.broadcast.sender import Broadcaster
from relax_events.weights.manifest import WeightManifest, Weights
from relax_events.weights.transport import StoreTransport


class BroadcastPublisher(StoreTransport):
    """The trainer's side; see `WeightsTransport`."""

    def __init__(self, store: ObjectStore, broadcaster: Broadcaster) -> None:
        super().__init__(store, full_snapshot_interval=broadcaster.config.full_snapshot_interval)
        self.name, self._broadcaster = broadcaster.config.transport, broadcaster

    def publish(
        self, tensors: Mapping[str, Tensor], *, policy_version: int, in_transit: bytes | None = None
    ) -> tuple[ObjectRef, bytes]:
        """Write the version to the store; it is sent meanwhile, and may still be under way when
        this returns.
        """
        snapshot = self._broadcaster.offer(tensors, policy_version=policy_version)
        if snapshot is None:
            return super().publish(tensors, policy_version=policy_version, in_transit=in_transit)
        try:
            in_transit = transit_digest(tensors)
            written = super().publish(tensors, policy_version=policy_version, in_transit=in_transit)
            snapshot.digest.set_result(in_transit)
        finally:
            snapshot.digest.cancel()  # which changes nothing once it is known
        return written

    def close(self) -> None:
        """Send nothing more."""
        self._broadcaster.close()


class BroadcastReader(StoreTransport):
    """An engine's side; see `WeightsTransport`."""

    def __init__(self, store: ObjectStore, receiver: Receiver) -> None:
        super().__init__(store)
        self._receiver = receiver

    def is_coming(self, published: PolicyVersionPublished) -> bool:
        """Tell whether the trainer is sending us the version."""
        return self._receiver.is_in_transit(published.policy_version)

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Give what the trainer sent, if it is what the manifest says, else what the store has. It
        stays as it is until the next fetch.
        """
        version = published.policy_version
        manifest = WeightManifest.from_json(self._store.get(published.artifact))
        if (
            manifest.policy_version == version
            and (tensors := self._receiver.take(version, manifest.transit_digest)) is not None
        ):
            return Weights(version, tensors, manifest.digest, transport=self._receiver.transport)
        weights = super().fetch(published)
        self._receiver.loaded_from_store(version, weights.tensors)
        return weights

    def follow(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Join the trainer's engines, once a version has been taken from the store, and again
        wherever the log says that the trainer is.
        """
        self._receiver.start(wake)

        def note(event: Event) -> None:
            if isinstance(event, EnginesEnlisted):
                self._receiver.apply(event)

        return note

    def close(self) -> None:
        """Leave the trainer."""
        self._receiver.close()
