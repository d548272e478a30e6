"""The broker object without a running broker: error types, and nothing left behind."""

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from relax_events.cli.broker import start as start_command
from relax_events.errors import BrokerError, BrokerUnavailable, ConfigError, EnvironmentProblem
from relax_events.kafka.embedded import EmbeddedBroker, launch
from relax_events.kafka.embedded.directory import BrokerBusy, exclusive_access
from relax_events.kafka.embedded.jars import Jar, JarLock

JAR = b"not really a jar"
LOCK = JarLock(
    "9.9.9", (Jar("org/example/node-9.9.9.jar", len(JAR), hashlib.sha256(JAR).hexdigest()),)
)


@pytest.fixture
def java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A machine with one jar in its cache, whose Java runs a shell script instead of a broker."""
    cache = tmp_path / "cache" / "relax-events" / "kafka-9.9.9"
    cache.mkdir(parents=True)
    (cache / "node-9.9.9.jar").write_bytes(JAR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setattr(launch, "read_jar_lock", lambda: LOCK)
    (tmp_path / "jdk" / "bin").mkdir(parents=True)
    (tmp_path / "jdk" / "lib" / "server").mkdir(parents=True)
    (tmp_path / "jdk" / "lib" / "server" / "classes.jsa").touch()

    before = psutil.Process().children()  # the session's own broker may be among them

    def install(script: str) -> None:
        path = tmp_path / "jdk" / "bin" / "java"
        path.write_text(
            '#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "21"\'; exit; '
            f"fi\n{script}\n"
        )
        path.chmod(0o755)

    yield install
    assert [child for child in psutil.Process().children() if child not in before] == []


def remembered(directory: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((directory / "broker.json").read_text())
    return document


def test_start_gives_the_last_log_lines_when_the_broker_dies(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("echo 'log.dirs is owned by another user'; exit 1")
    broker = EmbeddedBroker(tmp_path / "node")
    with pytest.raises(
        BrokerError,
        match=r"ended by itself; the last lines of .*broker.log:\n  log.dirs is owned by another user",
    ):
        broker.start(timeout_seconds=60)
    assert not broker.is_running
    assert remembered(tmp_path / "node")["pid"] is None


def test_start_reports_disk_full_when_it_caused_the_broker_to_die(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("echo 'java.io.IOException: No space left on device'; exit 1")
    with pytest.raises(EnvironmentProblem, match=r"the disk under .*node is full"):
        EmbeddedBroker(tmp_path / "node").start(timeout_seconds=60)


def test_start_leaves_no_process_when_it_takes_too_long(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("exec sleep 60")
    broker = EmbeddedBroker(tmp_path / "node")
    with pytest.raises(BrokerUnavailable, match=r"was not ready within 0.2 s; see .*broker.log"):
        broker.start(timeout_seconds=0.2)
    assert broker.pid is None


def test_all_start_methods_share_a_timeout_and_concurrent_starters_wait_longer() -> None:
    ways = (EmbeddedBroker.start, EmbeddedBroker.restart, EmbeddedBroker.in_use, start_command)
    assert {signature(way).parameters["timeout_seconds"].default for way in ways} == {180.0}
    assert signature(EmbeddedBroker.start).parameters["busy_seconds"].default > 180.0


def test_start_names_the_port_when_it_is_taken(java: Callable[[str], None], tmp_path: Path) -> None:
    java("exit 1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port {port} on 127.0.0.1 is taken"):
            EmbeddedBroker(tmp_path / "node", port=port).start()


def test_start_refuses_when_the_disk_is_nearly_full(
    java: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java("exit 1")
    usage = SimpleNamespace(total=1 << 40, used=0, free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        EnvironmentProblem, match="5 MiB free, the embedded broker needs at least 256 MiB"
    ):
        EmbeddedBroker(tmp_path / "node").start()


def test_start_refuses_while_another_process_starts_or_stops_it(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    broker = EmbeddedBroker(tmp_path / "node")
    with exclusive_access(tmp_path / "node"):
        with pytest.raises(
            BrokerBusy, match="another process is starting or stopping the broker in"
        ):
            broker.start(busy_seconds=0.1)
        with pytest.raises(BrokerBusy, match="another process"):
            broker.restart()
        with pytest.raises(EnvironmentProblem, match="another process"):
            broker.stop(busy_seconds=0)


def test_start_error_names_the_folder_that_cannot_be_created(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EnvironmentProblem, match=f"can't use {tmp_path / 'file' / 'node'}: .*Not a directory"
    ):
        EmbeddedBroker(tmp_path / "file" / "node").start()


def test_start_keeps_the_port_of_the_last_start(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("echo no; exit 1")
    ports = []
    for _ in range(2):
        with pytest.raises(BrokerError):
            EmbeddedBroker(tmp_path / "node").start(timeout_seconds=60)
        ports.append(
            (
                remembered(tmp_path / "node")["port"],
                remembered(tmp_path / "node")["controller_port"],
            )
        )
    assert ports[0] == ports[1]
    assert EmbeddedBroker(tmp_path / "node").bootstrap_servers == f"127.0.0.1:{ports[0][0]}"


def test_start_takes_another_port_when_the_last_one_is_taken(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("echo no; exit 1")
    (tmp_path / "node").mkdir()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        state = {"port": taken, "controller_port": 20002, "kafka_version": "9.9.9"}
        (tmp_path / "node" / "broker.json").write_text(json.dumps(state))
        with pytest.raises(BrokerError, match="ended by itself"):
            EmbeddedBroker(tmp_path / "node").start(timeout_seconds=60)
        assert remembered(tmp_path / "node")["port"] != taken
        (tmp_path / "node" / "broker.json").write_text(json.dumps(state))
        with pytest.raises(EnvironmentProblem, match=f"port {taken} on 127.0.0.1 is taken"):
            EmbeddedBroker(tmp_path / "node").restart()  # its users know it by that port


def test_broker_that_is_killed_during_its_start_says_so(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("echo loading; kill -KILL $$")
    broker = EmbeddedBroker(tmp_path / "node")
    with pytest.raises(BrokerError, match=r"was killed \(SIGKILL\); see .*broker.log"):
        broker.start(timeout_seconds=60)
    assert broker.exit_code == -signal.SIGKILL


def test_start_does_not_mistake_a_recycled_pid_for_its_broker(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    own = psutil.Process()
    state = {
        "port": 20001,
        "controller_port": 20002,
        "kafka_version": "9.9.9",
        "pid": os.getpid(),
        "started_at_seconds": own.create_time(),
    }
    (tmp_path / "node" / "broker.json").write_text(json.dumps(state))
    broker = EmbeddedBroker(tmp_path / "node")
    assert not broker.is_running
    broker.kill()
    assert own.is_running()


def test_bootstrap_servers_error_gives_remedy_when_no_broker_was_started(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "node")
    with pytest.raises(
        BrokerUnavailable,
        match=r"no broker has been started in .*; start one with `relax broker start`",
    ):
        _ = broker.bootstrap_servers
    assert isinstance(broker.explain_death(), BrokerUnavailable)


def test_stop_does_nothing_when_there_is_no_broker(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "node")
    broker.stop()
    broker.kill()
    assert broker.wait_for_end(0)
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_broker_refuses_a_port_out_of_range(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"port must be 0 to 65535, got {port}"):
        EmbeddedBroker(tmp_path, port=port)


def test_start_refuses_broker_settings_that_it_manages_itself(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("exit 1")
    with pytest.raises(ConfigError, match="node_properties must not set listeners"):
        EmbeddedBroker(
            tmp_path / "node", node_properties={"listeners": "PLAINTEXT://0.0.0.0:9092"}
        ).start()


def test_start_deletes_incomplete_archive_of_a_broker_not_stopped_cleanly(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java("exit 1")
    draft = tmp_path / "cache" / "classes-0.1-2.tmp"
    draft.write_bytes(b"half")
    (tmp_path / "node").mkdir()
    state = {
        "port": 0,
        "controller_port": 0,
        "kafka_version": "9.9.9",
        "pid": None,
        "archive_at_exit": str(draft),
    }
    (tmp_path / "node" / "broker.json").write_text(json.dumps(state))
    with pytest.raises(BrokerError):
        EmbeddedBroker(tmp_path / "node").start(timeout_seconds=60)
    assert not draft.exists()


def test_stop_keeps_the_archive_that_a_clean_exit_wrote(
    java: Callable[[str], None], tmp_path: Path
) -> None:
    java(
        'for word; do case "$word" in -XX:ArchiveClassesAtExit=*) archive="${word#*=}";; '
        "esac; done\n"
        "trap 'echo whole > \"$archive\"; exit' TERM; echo up; while :; do sleep 0.02; done"
    )
    broker = EmbeddedBroker(tmp_path / "node")
    running, state, _ = launch.launch(
        _made(broker.directory), last=None, wanted_port=0, node_properties={}
    )
    deadline = time.monotonic() + 60
    while "up" not in broker.log_path.read_text():
        assert time.monotonic() < deadline
        assert not broker.wait_for_end(0.01)
    assert broker.pid == running.pid
    broker.stop()
    assert state.archive_at_exit is not None
    archives = list(Path(state.archive_at_exit).parent.glob("classes-*"))
    assert [path.suffix for path in archives] == [".jsa"]
    assert archives[0].read_text() == "whole\n"


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
