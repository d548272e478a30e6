"""The marker of an object store: an object that names the run that owns the store, with a random
value that the run's log repeats.

The first worker that opens a store without a marker claims it, with the id of its Kafka cluster.
Another run with the same location is refused. A run of the same name on another cluster is refused
too, unless its log has the marker's value: then the run was moved there with its log. Nothing is
deleted from a store whose marker differs from the log.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import orjson

from relax_events.errors import ConfigError, ObjectError
from relax_events.events.types import RunDescribed
from relax_events.objects.rights import MARKER
from relax_events.objects.store import ObjectStore


@dataclass(frozen=True, slots=True)
class StoreMarker:
    """The content of a marker."""

    run_id: str
    value: str
    """32 random hexadecimal digits."""
    cluster_id: str = ""
    """The id of the Kafka cluster on which the run was started; empty when unknown."""


def read_marker(store: ObjectStore) -> StoreMarker | None:
    """Return the marker of a store, or None.

    Raises:
        ConfigError: The object exists but is not a valid marker.
    """
    if not store.exists(MARKER):
        return None
    try:
        fields = orjson.loads(store.get_at(MARKER))
        return StoreMarker(
            str(fields["run_id"]), str(fields["value"]), str(fields.get("cluster_id", ""))
        )
    except (ObjectError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{store.uri(MARKER)} must be a marker with run_id and value, and can't be read as "
            f"one: {error}; give the run another objects.uri"
        ) from error


def claim_store(
    store: ObjectStore, *, run_id: str, cluster_id: str = "", logged_marker: str = ""
) -> StoreMarker:
    """Return the marker of a run's store, creating it if it is missing. Of several concurrent
    workers, one creates it.

    Args:
        store: The store.
        run_id: The run that claims the store.
        cluster_id: The id of the run's Kafka cluster; empty when unknown.
        logged_marker: The value on the run's log; empty when the log has none.
    Raises:
        ConfigError: The store belongs to another run, or to a run of the same name on another
            cluster; the text names both.
    """
    mark = read_marker(store)
    if mark is None:
        store.put_new(
            MARKER, orjson.dumps(asdict(StoreMarker(run_id, secrets.token_hex(16), cluster_id)))
        )
        mark = read_marker(store)
    if mark is None or mark.run_id != run_id:
        owner = f"run {mark.run_id}" if mark else "another owner"
        raise ConfigError(
            f"the object store {store.uri('')} belongs to {owner}, and this is run {run_id}; "
            "give this run another objects.uri"
        )
    if (
        "" not in (mark.cluster_id, cluster_id)
        and mark.cluster_id != cluster_id
        and logged_marker != mark.value
    ):
        raise ConfigError(
            f"the object store {store.uri('')} belongs to run {run_id} of Kafka cluster "
            f"{mark.cluster_id}, and this is a run of that name on cluster {cluster_id}; give this "
            "run another run.id or objects.uri, or delete what lies there if that cluster is gone"
        )
    return mark


def find_logged_marker(descriptions: Sequence[RunDescribed]) -> str:
    """Return the newest marker value on a run's log; empty when there is none."""
    return next((event.store_marker for event in reversed(descriptions) if event.store_marker), "")


def require_marker(mark: StoreMarker, *, logged_marker: str, store_uri: str) -> None:
    """Refuse a store that has the run's name but not the marker value of the run's log.

    Args:
        mark: The marker that was read from the store.
        logged_marker: The value on the run's log; empty when the log has none.
        store_uri: The store's URI, for the error text.
    Raises:
        ConfigError: They differ.
    """
    if logged_marker and logged_marker != mark.value:
        raise ConfigError(
            f"the object store {store_uri} belongs to another run that is called {mark.run_id}: "
            f"its {MARKER} must hold {logged_marker}, got {mark.value}; give this run another "
            "run.id or objects.uri"
        )
