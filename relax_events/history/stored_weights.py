"""Compares the weight manifests in the object store with what was published and committed."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import Event, PolicyVersionPublished, TrainStepCommitted
from relax_events.objects import ObjectStore
from relax_events.projections.ledger import Ledger
from relax_events.projections.ledger_findings import Rule
from relax_events.weights.manifest import WeightManifest

PREFIX = "weights/"


class StoredWeights:
    """The published manifest and the committed digest of each version that is in the store."""

    def __init__(self, config: RunConfig) -> None:
        self._store: ObjectStore | None = None
        self._failure = ""
        self._stored: frozenset[str] = frozenset()
        self._artifacts: dict[int, ObjectRef] = {}
        self._digests: dict[int, bytes] = {}
        try:
            self._store = ObjectStore.open(
                config.objects_uri, uri_aliases=config.objects.uri_aliases
            )
            self._stored = frozenset(self._store.list(PREFIX))
        except (ConfigError, ObjectError) as error:
            self._failure = str(error)

    @property
    def store(self) -> ObjectStore | None:
        """The run's object store; None where it can't be opened."""
        return self._store

    def apply(self, event: Event) -> None:
        """Record what was published or committed of a stored version."""
        if isinstance(event, PolicyVersionPublished) and self._is_stored(event.artifact):
            self._artifacts[event.policy_version] = event.artifact
        elif isinstance(event, TrainStepCommitted) and event.policy_version in self._artifacts:
            self._digests[event.policy_version] = event.weights_digest

    def _is_stored(self, artifact: ObjectRef) -> bool:
        try:
            return self._store is not None and self._store.key(artifact.uri) in self._stored
        except ObjectError:  # in a store that this run no longer uses
            return False

    def check(self, ledger: Ledger) -> None:
        """Read the manifests, and add differences to the ledger."""
        if self._failure:
            ledger.add_unverified(
                "{} object store holds the weights as published, since it can't be read: "
                + self._failure.replace("{", "{{").replace("}", "}}"),
                1,
            )
        for version, artifact in self._artifacts.items():
            if reason := self._difference(version, artifact):
                ledger.add_finding(Rule.MANIFEST, f"policy version {version}: {reason}")

    def _difference(self, version: int, artifact: ObjectRef) -> str:
        assert self._store is not None
        try:
            manifest = WeightManifest.from_json(self._store.get(artifact))
        except (ObjectError, WeightsError) as error:
            was_deleted = self._store.key(artifact.uri) not in self._store.list(
                PREFIX
            )  # by the run, which still runs
            return "" if was_deleted else str(error)
        if manifest.policy_version != version:
            return f"{artifact.uri} is of version {manifest.policy_version}"
        if version in self._digests and manifest.digest != self._digests[version]:
            return (
                f"{artifact.uri} is of weights {manifest.digest.hex()[:16]}, its train step "
                f"committed {self._digests[version].hex()[:16]}"
            )
        return ""
