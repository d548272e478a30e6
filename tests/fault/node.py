"""Kafka nodes with listeners chosen by a test: one behind a link, or several of one cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from relax_events.kafka.embedded import process as processes
from relax_events.kafka.embedded.directory import START_SECONDS
from relax_events.kafka.embedded.jars import ensure_jars, locate_cache, read_jar_lock
from relax_events.kafka.embedded.java import build_broker_command, find_java, locate_class_archive
from relax_events.kafka.embedded.ports import HOST, choose_port
from relax_events.kafka.embedded.process import wait_until_ready
from relax_events.kafka.embedded.settings import build_server_properties
from relax_events.kafka.embedded.storage import NODE_ID, ensure_formatted

STOP_SECONDS = 10.0


def choose_ports(number: int) -> list[int]:
    """Return so many different free ports."""
    ports: list[int] = []
    while len(ports) < number:
        ports.append(choose_port(taken=frozenset(ports)))
    return ports


class Node:
    """One Kafka node in a folder. Clients connect to `port`; `properties` configures the rest. It
    replaces a run's embedded broker: it is started and killed, and keeps its records and ports.
    Clients connect without login.
    """

    password_file: Path | None = None

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        controller_port: int,
        properties: Mapping[str, str],
        node_id: int = NODE_ID,
        cluster_id: str = "",
    ) -> None:
        self.directory, self.port = directory, port
        (directory / "tmp").mkdir(parents=True)
        ensure_formatted(self.data, node_id=node_id, cluster_id=cluster_id)
        text = build_server_properties(
            self.data, port=port, controller_port=controller_port, overrides={}
        )
        self._properties = directory / "server.properties"
        self._properties.write_text(
            text + "".join(f"{key}={value}\n" for key, value in properties.items())
        )  # the last one of a key counts
        self._process: psutil.Process | None = None

    @property
    def data(self) -> Path:
        """The folder of its records."""
        return self.directory / "data"

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        if self._process is None or processes.wait_for_end(self._process, 0):
            return None
        return self._process.pid

    def spawn(self) -> None:
        """Start its process unless it runs, and don't wait."""
        if self.pid is not None:
            return
        java, lock = find_java(), read_jar_lock()
        jars = ensure_jars(lock, locate_cache(lock))
        archive = locate_class_archive(java, jars, jars[0].parent)
        words = build_broker_command(
            java, jars, self._properties, archive=archive, archive_at_exit=None
        )
        self._process = processes.spawn(words, log=self.directory / "broker.log")

    def start(self) -> None:
        """Start it unless it runs, and wait until it serves."""
        self.spawn()
        assert self._process is not None
        ready = wait_until_ready(
            self._process, self.port, deadline_seconds=time.monotonic() + START_SECONDS, client={}
        )
        assert ready, (self.directory / "broker.log").read_text()[-3000:]

    def stop(self) -> None:
        """End it in good order."""
        if self._process is not None:
            assert processes.terminate(self._process, timeout_seconds=STOP_SECONDS)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            processes.terminate(self._process, timeout_seconds=0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def node_behind_link(
    directory: Path,
    *,
    port: int,
    linked_port: int,
    link_port: int,
    properties: Mapping[str, str] | None = None,
) -> Node:
    """Return a node with a second listener, whose advertised address is the link's."""
    controller_port = choose_port(taken=frozenset({port, linked_port, link_port}))
    listeners = {
        "listeners": f"PLAINTEXT://{HOST}:{port},LINKED://{HOST}:{linked_port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port},LINKED://{HOST}:{link_port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,LINKED:PLAINTEXT",
    }
    return Node(
        directory,
        port=port,
        controller_port=controller_port,
        properties=listeners | dict(properties or {}),
    )
