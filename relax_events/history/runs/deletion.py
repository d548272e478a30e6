"""Deletes a run: its topics, groups and objects, and nothing else.

The order makes an interrupted deletion repeatable: objects are deleted first, the topic with the
run's description last, and a missing object counts as deleted.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused
from relax_events.history.runs.details import list_forks, open_existing_store
from relax_events.history.runs.listing import RunSummary, parse_run_id, read_run, read_runs
from relax_events.kafka.connection import Connection
from relax_events.kafka.inventory import Inventory
from relax_events.objects import ObjectStore
from relax_events.objects.marker import read_marker
from relax_events.objects.rights import FOLDERS, MARKER
from relax_events.topics import TopicPlan
from relax_events.topics.names import COMMANDS


@dataclass(frozen=True, slots=True)
class Deletion:
    """What is deleted with a run. `note` gives the reason where objects stay."""

    run_id: str
    topics: Mapping[str, int]
    groups: list[str]
    store_uri: str
    objects: list[str]
    note: str

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return not (self.topics or self.groups or self.objects)


def plan_deletion(
    connection: Connection, run_id: str, *, run_file: RunConfig | None = None
) -> Deletion:
    """Return what belongs to a run and to no other.

    Args:
        connection: To the cluster.
        run_id: The run.
        run_file: Its run file, for a run whose log does not describe it.
    Raises:
        ConfigError: There is no such run.
    """
    run = read_run(connection, run_id)
    config = run.config or (
        run_file if run_file is not None and run_file.run.id == run_id else None
    )
    groups = [
        name
        for name in Inventory(connection).groups(TopicPlan.build_topic_name(run_id, ""))
        if parse_run_id(name) == run_id
    ]
    store_uri, objects, note = _find_objects(
        run, config, read_runs(connection, with_progress=False).values()
    )
    return Deletion(run_id, run.topics, groups, store_uri, objects, note)


def _find_objects(
    run: RunSummary, config: RunConfig | None, runs: Iterable[RunSummary]
) -> tuple[str, list[str], str]:
    """Return a run's object store, the objects that are deleted with it, and why none are.

    The log is only a claim, so the store must confirm it by its marker. Only the run that owns the
    store could repeat the marker on its log.
    """
    if config is None:
        return (
            "",
            [],
            (
                "the log does not say where its objects are; give its run file with --config to "
                "delete them too"
            ),
        )
    uri = config.objects_uri
    for other in runs:
        if (
            other.run_id != run.run_id
            and other.config is not None
            and stores_overlap(other.config.objects_uri, uri)
        ):
            return uri, [], f"run {other.run_id} keeps its objects in the same store, so they stay"
    store = open_existing_store(config)
    objects = [] if store is None else [key for folder in FOLDERS for key in store.list(folder)]
    if store is None or not (objects or store.exists(MARKER)):
        return uri, [], ""
    mark, text = read_marker(store), run.description.store_marker if run.description else ""
    if mark is None or (mark.run_id, mark.value) != (run.run_id, text):
        marked = f"says run {mark.run_id} and {mark.value}" if mark else "is missing"
        return (
            uri,
            [],
            (
                f"the marker {store.uri(MARKER)} {marked}, and the log says run {run.run_id} and "
                f"{text or 'none'}; so the objects stay"
            ),
        )
    return uri, [*objects, MARKER], ""


def stores_overlap(one: str, other: str) -> bool:
    """Return whether two stores are the same, or one contains the other, however their URIs are
    written.
    """
    first, second = store_root(one), store_root(other)
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def store_root(uri: str) -> tuple[str, ...]:
    """Return the path parts of a store's root: on this machine with links resolved, and always
    without dots and percent signs.
    """
    parts = urlsplit(uri)
    path = posixpath.normpath(f"/{unquote(parts.path)}")
    if parts.scheme.lower() == "file":
        path = str(Path(path).resolve())
    return parts.scheme.lower(), parts.netloc, *(part for part in path.split("/") if part)


def require_deletable(run: RunSummary, runs: Iterable[RunSummary]) -> None:
    """Refuse to delete a run that is active or has dependent runs.

    Raises:
        BrokerRefused: The text names them.
    """
    if writers := run.possible_writers:
        raise BrokerRefused(
            f"run {run.run_id} is active: {', '.join(writers)} sent a heartbeat within "
            f"{run.workers.heartbeat_timeout_seconds:g} s (workers.heartbeat_timeout_seconds) and "
            "may write again; stop it first, or give --force"
        )
    if users := [
        other
        for other in runs
        if (config := other.config) and config.is_replay and config.parent.run == run.run_id
    ]:
        named = ", ".join(list_forks(users, run.run_id))
        raise BrokerRefused(
            f"run {run.run_id} holds the rollouts of {named}; delete that first, or give --force"
        )


def delete_run(connection: Connection, deletion: Deletion) -> None:
    """Delete what the plan names.

    Raises:
        BrokerRefused: A group has members: workers of the run are alive.
        ObjectError: The store refused; topics and groups are untouched.
    """
    inventory = Inventory(connection)
    if deletion.objects:
        store = ObjectStore.open(deletion.store_uri)
        store.delete(key for key in deletion.objects if key != MARKER)
        for folder in FOLDERS:
            store.delete_unfinished(folder, min_age_seconds=0)
        store.delete([MARKER])  # last: an interrupted deletion needs it to continue
    inventory.delete_groups(deletion.groups)
    inventory.delete_group_settings(deletion.groups)
    last = TopicPlan.build_topic_name(deletion.run_id, COMMANDS)
    inventory.delete_topics([name for name in deletion.topics if name != last])
    inventory.delete_topics([name for name in deletion.topics if name == last])
