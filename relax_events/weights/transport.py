"""How the tensors of a policy version travel from the trainer to engines and scorers.

The announcement on `control.policy-versions` always carries the artifact's reference; a transport
decides how the tensors themselves move. `publish` runs in the trainer before the version is
announced, `fetch` in every reader after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import structlog

from relax_events.errors import WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.weights.artifact_reader import CachedWeights, RawTensors, read_weights
from relax_events.weights.manifest import Base, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from relax_events.weights.artifact_writer import WrittenWeights

log = structlog.get_logger()


class WeightsTransport(Protocol):
    """One way for tensors to travel. `name` is what `PolicyVersionPublished.transports` lists."""

    name: str

    def publish(
        self, tensors: Mapping[str, Tensor], *, policy_version: int
    ) -> tuple[ObjectRef, bytes]:
        """Make a version available; return its artifact's reference and the weights' digest.

        The tensors are the transport's: nobody may change them any more. Waits for no reader.

        Raises:
            ObjectError: The artifact could not be written; the version must not be announced.
        """
        ...

    def is_coming(self, published: PolicyVersionPublished) -> bool:
        """Tell whether the version is under way to us at this instant: a fetch a little later costs
        less, or nothing.
        """
        ...

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Get a version that was announced, whole and verified; waits for nobody but the medium.

        Raises:
            WeightsError: It is incomplete, altered or gone; go on with the version at hand.
        """
        ...

    def follow(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Begin to take what is sent to us: give a listener for the control log, and call `wake`,
        from any thread, when something has come.
        """
        ...

    def close(self) -> None:
        """End what is under way."""
        ...


class NullWeightsReader:
    """Follows versions without their tensors, for an engine that holds none."""

    name = "none"

    def publish(
        self, tensors: Mapping[str, Tensor], *, policy_version: int
    ) -> tuple[ObjectRef, bytes]:
        """Refuse: there is nothing by which tensors could travel."""
        raise WeightsError(
            f"policy version {policy_version} with {len(tensors)} tensors can't be published "
            "without a transport; use another one"
        )

    def is_coming(self, published: PolicyVersionPublished) -> bool:
        """Return False: there is nothing to wait for."""
        return False

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Give the version, without a tensor and at no cost."""
        return Weights(published.policy_version, {}, published.artifact.digest)

    def follow(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Listen to nothing: nobody sends us anything."""
        return lambda _: None

    def close(self) -> None:
        """Do nothing: nothing is open."""


class StoreTransport:
    """Tensors by the object store: the default, and how a late joiner or an engine in another
    cluster catches up.
    """

    name = "store"

    def __init__(self, store: ObjectStore, *, full_snapshot_interval: int = 1) -> None:
        """Open either side.

        Args:
            store: The run's.
            full_snapshot_interval: As `weights.full_snapshot_interval`. Above 1 a copy of the newest version is kept, on
                both sides.
        """
        self._store, self._full_every = store, full_snapshot_interval
        self._written: WrittenWeights | None = None
        self._held: CachedWeights | None = None

    def publish(
        self, tensors: Mapping[str, Tensor], *, policy_version: int, in_transit: bytes | None = None
    ) -> tuple[ObjectRef, bytes]:
        """See `WeightsTransport.publish`; `in_transit` as `artifacts.write_weights` has it."""
        from relax_events.weights.artifact_writer import WrittenWeights, copy_to_cpu, write_weights

        if self._full_every == 1:
            return write_weights(
                self._store, tensors, policy_version=policy_version, in_transit=in_transit
            )
        tensors = copy_to_cpu(
            tensors
        )  # off the device once, for the digest, the comparison, the files and the next version
        former = self._written if policy_version % self._full_every else None
        reference, digest = write_weights(
            self._store,
            tensors,
            policy_version=policy_version,
            former=former,
            in_transit=in_transit,
        )
        self._written = WrittenWeights(Base(reference, digest), tensors)
        return reference, digest

    def is_coming(self, published: PolicyVersionPublished) -> bool:
        """Return False: what is announced is in the store."""
        return False

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """See `WeightsTransport.fetch`."""
        weights = self._read(published.artifact)
        if weights.policy_version != published.policy_version:
            raise WeightsError(
                f"{published.artifact.uri} was announced as policy version "
                f"{published.policy_version}, it holds {weights.policy_version}"
            )
        return weights

    def _read(self, reference: ObjectRef) -> Weights:
        held, self._held = self._held, None
        try:
            weights = read_weights(self._store, reference, held=held)
        except WeightsError as error:
            if held is None:
                raise
            log.warning(
                "weights.read_again", error=str(error)
            )  # without what we held, which may be what is wrong
            weights = read_weights(self._store, reference)
        if self._full_every > 1 and isinstance(weights.tensors, RawTensors):
            self._held = CachedWeights(weights.digest, weights.tensors)
        return weights

    def follow(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Listen to nothing: nobody sends us anything."""
        return lambda _: None

    def close(self) -> None:
        """Do nothing: nothing is open."""
