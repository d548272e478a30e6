"""How the tensors of a policy version travel from the trainer to engines and scorers.

The announcement on `control.policy-versions` always carries the artifact's reference; a transport decides how the tensors
themselves move. `publish` runs in the trainer before the version is announced, `fetch` in every reader after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from relax_events.errors import WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import PolicyVersionPublished
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

        The tensors may change once this returns. Waits for no reader.

        Raises:
            ObjectError: The artifact could not be written; the version must not be announced.
        """
        ...

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Get a version that was announced, whole and verified; waits for nobody but the medium.

        Raises:
            WeightsError: It is incomplete, altered or gone; go on with the version at hand.
        """
        ...


class VersionsOnly:
    """Follows versions without their tensors, for an engine that holds none."""

    name = "none"

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> tuple[ObjectRef, bytes]:
        """Refuse: there is nothing by which tensors could travel."""
        raise WeightsError(f"policy version {policy_version} with {len(tensors)} tensors can't be published without a transport; use another one")

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """Give the version, without a tensor and at no cost."""
        return Weights(published.policy_version, {}, published.artifact.digest)


class StoreTransport:
    """Tensors by the object store: the default, and how a late joiner or an engine in another cluster catches up."""

    name = "store"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> tuple[ObjectRef, bytes]:
        """See `WeightsTransport.publish`."""
        from relax_events.weights.artifacts import write_weights  # which loads torch: readers stay light

        return write_weights(self._store, tensors, policy_version=policy_version)

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        """See `WeightsTransport.fetch`."""
        weights = read_weights(self._store, published.artifact)
        if weights.policy_version != published.policy_version:
            raise WeightsError(
                f"{published.artifact.uri} was announced as policy version {published.policy_version}, it holds {weights.policy_version}"
            )
        return weights
