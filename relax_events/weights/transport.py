"""How the tensors of a policy version travel from the trainer to engines and scorers.

The announcement on `control.policy-versions` always carries the artifact's reference; a transport decides how the tensors
themselves move. `publish` runs in the trainer before the version is announced, `fetch` in every reader after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from relax_events.errors import WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.weights.manifest import Weights
from relax_events.weights.reading import read_weights

if TYPE_CHECKING:
    from torch import Tensor


class WeightsTransport(Protocol):
    """One way for tensors to travel. `name` is what `PolicyVersionPublished.transports` lists."""

    name: str

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> tuple[ObjectRef, bytes]:
        """Make a version available; return its artifact's reference and the weights' digest.

        The tensors are the transport's: nobody may change them any more. Waits for no reader.

        Raises:
            ObjectError: The artifact could not be written; the version must not be announced.
        """
        ...

    def is_coming(self, published: PolicyVersionPublished) -> bool:
        """Tell whether the version is under way to us at this instant: a fetch a little later costs less, or nothing."""
        ...

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Get a version that was announced, whole and verified; waits for nobody but the medium.

        Raises:
            WeightsError: It is incomplete, altered or gone; go on with the version at hand.
        """
        ...

    def follow(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Begin to take what is sent to us: give a listener for the control log, and call `wake`, from any thread, when something has come."""
        ...

    def close(self) -> None:
        """End what is under way."""
        ...


class VersionsOnly:
    """Follows versions without their tensors, for an engine that holds none."""

    name = "none"

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> tuple[ObjectRef, bytes]:
        """Refuse: there is nothing by which tensors could travel."""
        raise WeightsError(f"policy version {policy_version} with {len(tensors)} tensors can't be published without a transport; use another one")

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
    """Tensors by the object store: the default, and how a late joiner or an engine in another cluster catches up."""

    name = "store"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> tuple[ObjectRef, bytes]:
        """See `WeightsTransport.publish`."""
        from relax_events.weights.artifacts import write_weights  # which loads torch: readers stay light

        return write_weights(self._store, tensors, policy_version=policy_version)

    def is_coming(self, published: PolicyVersionPublished) -> bool:
        """Return False: what is announced is in the store."""
        return False

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """See `WeightsTransport.fetch`."""
        weights = read_weights(self._store, published.artifact)
        if weights.policy_version != published.policy_version:
            raise WeightsError(
                f"{published.artifact.uri} was announced as policy version {published.policy_version}, it holds {weights.policy_version}"
            )
        return weights

    def follow(self, wake: Callable[[], None]) -> Callable[[Event], None]:
        """Listen to nothing: nobody sends us anything."""
        return lambda _: None

    def close(self) -> None:
        """Do nothing: nothing is open."""
