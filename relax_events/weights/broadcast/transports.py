"""The transports `gloo` and `nccl`: every version is published to the store and also sent to the
connected engines.

A version is sent while it is written to the store. It is used once its record is on the log, and
only if it matches the digest in the artifact's manifest, so an engine's weights do not depend on
the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from relax_events.events.parts import ObjectRef
from relax_events.events.types import BroadcastMembership, Event, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.weights.broadcast.receiver import Receiver
from relax_events.weights.broadcast.sender import Broadcaster
from relax_events.weights.file_content import FileContent, all_tensors
from relax_events.weights.manifest import WeightManifest, Weights
from relax_events.weights.transport import StorePublisher, StoreReader


class BroadcastPublisher(StorePublisher):
    """The trainer's side; see `WeightsPublisher`."""

    def __init__(
        self, store: ObjectStore, broadcaster: Broadcaster, *, base_digest: bytes = b""
    ) -> None:
        super().__init__(
            store,
            full_snapshot_interval=broadcaster.config.full_snapshot_interval,
            base_digest=base_digest,
        )
        self._broadcaster = broadcaster

    @property
    def keeps_files(self) -> bool:
        """Return True: a version is sent from them, also after it was written."""
        return True

    def publish(
        self, files: Iterable[FileContent], *, policy_version: int
    ) -> tuple[ObjectRef, bytes]:
        """Write the version to the store while it is sent to engines; sending may still be in
        progress when this returns.
        """
        held = list(files)
        snapshot = self._broadcaster.offer(all_tensors(held), policy_version=policy_version)
        if snapshot is None:
            return super().publish(held, policy_version=policy_version)
        try:
            reference, digest = super().publish(held, policy_version=policy_version)
            snapshot.digest.set_result(digest)
        finally:
            snapshot.digest.cancel()  # has no effect once it is set
        return reference, digest

    def close(self) -> None:
        """Stop sending."""
        self._broadcaster.close()


class BroadcastReader(StoreReader):
    """An engine's side; see `WeightsReader`."""

    def __init__(self, store: ObjectStore, receiver: Receiver) -> None:
        super().__init__(store)
        self._receiver = receiver

    def is_in_transit(self, published: PolicyVersionPublished) -> bool:
        """Return whether the trainer is sending the version to this process now."""
        return self._receiver.is_in_transit(published.policy_version)

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Return the weights that the trainer sent if they match the manifest, else read the store.
        The tensors stay valid until the next fetch.
        """
        version = published.policy_version
        manifest = WeightManifest.from_json(self._store.get(published.artifact))
        if (
            manifest.policy_version == version
            and (tensors := self._receiver.take(version, manifest.digest)) is not None
        ):
            return Weights(
                version,
                tensors,
                manifest.digest,
                transport=self._receiver.transport,
                base_digest=manifest.base_digest,
            )
        weights = super().fetch(published)
        self._receiver.loaded_from_store(version, weights.tensors)
        return weights

    def subscribe(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Join the broadcast once a version has been read from the store, and again when the
        control log announces another trainer.
        """
        self._receiver.start(wake)

        def apply(event: Event) -> None:
            if isinstance(event, BroadcastMembership):
                self._receiver.apply(event)

        return apply

    def close(self) -> None:
        """Leave the broadcast."""
        self._receiver.close()
