"""Moves the tensors of a policy version from the trainer to engines and scorers.

The record on `control.policy-versions` always carries the artifact's reference. A transport decides
how the tensors themselves move. The trainer calls `WeightsPublisher.publish` before it announces a
version; every reader calls `WeightsReader.fetch` after the announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import structlog

from relax_events.errors import WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.model_folder.tensors import StoredTensors
from relax_events.objects import ObjectStore
from relax_events.weights.artifact_reader import CachedWeights, read_weights
from relax_events.weights.manifest import Base, Weights

if TYPE_CHECKING:
    from relax_events.weights.artifact_writer import WrittenWeights
    from relax_events.weights.file_content import FileContent

log = structlog.get_logger()


class WeightsPublisher(Protocol):
    """The trainer's side of a transport."""

    @property
    def keeps_files(self) -> bool:
        """Whether `publish` uses a file after it has asked for the next one; each then has memory
        of its own.
        """
        ...

    def publish(
        self, files: Iterable[FileContent], *, policy_version: int
    ) -> tuple[ObjectRef, bytes]:
        """Make a version available; return its artifact's reference and the weights' digest.

        Waits for no reader.

        Args:
            files: The version, laid out as files, which must not change afterwards.
            policy_version: Of it.
        Raises:
            ObjectError: The artifact could not be written; the version must not be announced.
        """
        ...

    def close(self) -> None:
        """Abort transfers in progress."""
        ...


class WeightsReader(Protocol):
    """An engine's or a scorer's side of a transport."""

    def is_in_transit(self, published: PolicyVersionPublished) -> bool:
        """Return whether the version is being sent to this process now: fetching it a little later
        is cheaper or free.
        """
        ...

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Return an announced version, complete and verified; waits for the medium alone.

        Raises:
            WeightsError: It is incomplete, altered or deleted; continue with the loaded version.
        """
        ...

    def subscribe(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Start receiving; return a listener for the control log.

        Args:
            wake: Called from any thread when a version has arrived.
        """
        ...

    def close(self) -> None:
        """Abort transfers in progress."""
        ...


class NullWeightsReader:
    """Reads versions without their tensors, for an engine that holds none."""

    def is_in_transit(self, published: PolicyVersionPublished) -> bool:
        """Return False: no tensors are sent."""
        return False

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Return the version without tensors, at no cost."""
        return Weights(published.policy_version, {}, published.artifact.digest)

    def subscribe(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Return a listener that does nothing."""
        return lambda _: None

    def close(self) -> None:
        """Do nothing: nothing is open."""


class StorePublisher:
    """Publishes versions to the object store: the default transport."""

    def __init__(
        self, store: ObjectStore, *, full_snapshot_interval: int = 1, base_digest: bytes = b""
    ) -> None:
        """Publish to a store.

        Args:
            store: The run's.
            full_snapshot_interval: As `weights.full_snapshot_interval`. Above 1 a copy of the
                newest version is kept.
            base_digest: Digest of the base model, where the versions are its adapters.
        """
        self._base_digest = base_digest
        self._store, self._full_snapshot_interval = store, full_snapshot_interval
        self._written: WrittenWeights | None = None

    @property
    def keeps_files(self) -> bool:
        """Whether the next version is written as changes to this one."""
        return self._full_snapshot_interval > 1

    def publish(
        self, files: Iterable[FileContent], *, policy_version: int
    ) -> tuple[ObjectRef, bytes]:
        """See `WeightsPublisher.publish`."""
        from relax_events.weights.artifact_writer import WrittenWeights, write_files
        from relax_events.weights.file_content import all_tensors

        if self._full_snapshot_interval == 1:
            return write_files(
                self._store, files, policy_version=policy_version, base_digest=self._base_digest
            )
        held = list(files)
        previous = self._written if policy_version % self._full_snapshot_interval else None
        reference, digest = write_files(
            self._store,
            held,
            policy_version=policy_version,
            previous=previous,
            base_digest=self._base_digest,
        )
        self._written = WrittenWeights(Base(reference, digest), all_tensors(held))
        return reference, digest

    def close(self) -> None:
        """Do nothing: nothing is open."""


class StoreReader:
    """Reads versions from the object store: the default transport, and how a late joiner or an
    engine in another cluster catches up.
    """

    def __init__(self, store: ObjectStore, *, full_snapshot_interval: int = 1) -> None:
        """Read from a store.

        Args:
            store: The run's.
            full_snapshot_interval: As `weights.full_snapshot_interval`. Above 1 the newest version
                is cached.
        """
        self._store, self._full_snapshot_interval = store, full_snapshot_interval
        self._cached: CachedWeights | None = None

    def is_in_transit(self, published: PolicyVersionPublished) -> bool:
        """Return False: an announced version is in the store."""
        return False

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """See `WeightsReader.fetch`."""
        weights = self._read(published.artifact)
        if weights.policy_version != published.policy_version:
            raise WeightsError(
                f"{published.artifact.uri} was announced as policy version "
                f"{published.policy_version}, it holds {weights.policy_version}"
            )
        return weights

    def _read(self, reference: ObjectRef) -> Weights:
        cached, self._cached = self._cached, None
        try:
            weights = read_weights(self._store, reference, cached=cached)
        except WeightsError as error:
            if cached is None:
                raise
            # read again without the cached version, which may be the altered one
            log.warning("weights.read_retried", error=str(error))
            weights = read_weights(self._store, reference)
        if self._full_snapshot_interval > 1 and isinstance(weights.tensors, StoredTensors):
            self._cached = CachedWeights(weights.digest, weights.tensors)
        return weights

    def subscribe(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Return a listener that does nothing: `fetch` reads when it is called."""
        return lambda _: None

    def close(self) -> None:
        """Do nothing: nothing is open."""
