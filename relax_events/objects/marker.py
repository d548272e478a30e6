"""The marker of a store: an object that names the run whose objects lie there, with a random value
that the run's log repeats.

A store without one is claimed by the first worker that opens it, with the id of its Kafka cluster.
A second run with the same location is refused by name; so is a run of the same name on another
cluster, unless its log repeats the value: then the run has moved there with its log. Nothing is
deleted from a store whose marker does not say what the log says.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import orjson

from relax_events.errors import ConfigError, ObjectError
from relax_events.events.types import RunDescribed
from relax_events.objects.store import ObjectStore

MARKER = "relax-run.json"


@dataclass(frozen=True, slots=True)
class StoreMarker:
    """What a marker holds."""

    run_id: str
    value: str
    """32 random hexadecimal digits."""
    cluster_id: str = ""
    """Of the Kafka cluster on which the run was begun; empty where that is not known."""


def read_marker(store: ObjectStore) -> StoreMarker | None:
    """Return the marker of a store, None where there is none.

    Raises:
        ConfigError: It is there and no marker of ours.
    """
    if not store.exists(MARKER):
        return None
    try:
        fields = orjson.loads(store.get_at(MARKER))
        return StoreMarker(
            str(fields["run_id"]), str(fields["value"]), str(fields.get("cluster_id", ""))
        )
    except (ObjectError, ValueError, KeyError, TypeError) as error:
        text = (
            f"{store.uri(MARKER)} must be a marker with run_id and value, and can't be read as "
            f"one: {error}"
        )
        raise ConfigError(f"{text}; give the run another objects.uri") from error


def claim_store(store: ObjectStore, *, run_id: str, cluster_id: str = "", told: str = "") -> StoreMarker:
    """Return the marker of a run's store; write it first where there is none. Of several workers
    that do so at once one succeeds.

    Args:
        store: The store.
        run_id: Whose it is to be.
        cluster_id: Of the run's Kafka cluster; empty where that is not known.
        told: The value on the run's log; empty where it tells none.
    Raises:
        ConfigError: The store is another run's, or that of a run of the same name on another
            cluster; the text names both.
    """
    mark = read_marker(store)
    if mark is None:
        store.put_new(
            MARKER, orjson.dumps(asdict(StoreMarker(run_id, secrets.token_hex(16), cluster_id)))
        )
        mark = read_marker(store)
    if mark is None or mark.run_id != run_id:
        owner = f"run {mark.run_id}" if mark else "somebody else"
        raise ConfigError(
            f"the object store {store.uri('')} belongs to {owner}, and this is run {run_id}; "
            "give this run another objects.uri"
        )
    if (
        "" not in (mark.cluster_id, cluster_id)
        and mark.cluster_id != cluster_id
        and told != mark.value
    ):
        owner = (
            f"run {run_id} of Kafka cluster {mark.cluster_id}, and this is a run of that name on "
            f"cluster {cluster_id}"
        )
        remedy = (
            "give this run another run.id or objects.uri, or delete what lies there if that "
            "cluster is gone"
        )
        raise ConfigError(f"the object store {store.uri('')} belongs to {owner}; {remedy}")
    return mark


def find_logged_marker(descriptions: Sequence[RunDescribed]) -> str:
    """Return the newest value that a run's log tells; empty where it tells none."""
    return next((event.store_marker for event in reversed(descriptions) if event.store_marker), "")


def require_marker(mark: StoreMarker, *, told: str, store_uri: str) -> None:
    """Refuse a store that has the run's name, and is not the one that its log knows.

    Args:
        mark: As read from the store.
        told: The value on the run's log; empty where it tells none.
        store_uri: For the error.
    Raises:
        ConfigError: They differ.
    """
    if told and told != mark.value:
        rule = (
            f"the object store {store_uri} belongs to another run that is called {mark.run_id}: "
            f"its {MARKER} must hold {told}, got {mark.value}"
        )
        raise ConfigError(f"{rule}; give this run another run.id or objects.uri")
