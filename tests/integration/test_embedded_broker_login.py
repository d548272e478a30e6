"""The embedded broker against other users of the machine: a process without the password gets
nothing, whatever state the folder was in before.
"""

from __future__ import annotations

import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from relax_events.config import BrokerConfig
from relax_events.errors import AccessDenied
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.embedded.directory import write_state
from relax_events.kafka.embedded.tool_login import build_client_properties
from relax_events.kafka.protocol.partition_leaders import read_metadata

SECONDS = 100.0
METADATA = bytes.fromhex("0000000e0003000100000001ffff00000000")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("node")) as running:
        yield running


def connection(broker: EmbeddedBroker, password_file: Path | None) -> Connection:
    table = BrokerConfig(
        bootstrap_servers=broker.bootstrap_servers,
        embedded_password_file=password_file,
        request_timeout_seconds=SECONDS,
    )
    return Connection.from_config(table, client_id="test")


def ping(broker: EmbeddedBroker, password_file: Path | None) -> None:
    Admin(connection(broker, password_file)).ping(timeout_seconds=SECONDS)


def test_client_with_the_password_file_can_log_in(broker: EmbeddedBroker) -> None:
    ping(broker, broker.password_file)
    asked = connection(broker, broker.password_file)  # requests that are sent by hand log in too
    assert read_metadata(asked, []).addresses == (broker.bootstrap_servers,)


def test_login_error_without_valid_password_names_the_remedy(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    with pytest.raises(
        AccessDenied,
        match=r"requires authentication, and this client has no credentials; for an embedded broker name the password file",
    ):
        ping(broker, None)
    (tmp_path / "guessed").write_text("guessed")
    with pytest.raises(AccessDenied, match="authentication of user 'relax' failed"):
        ping(broker, tmp_path / "guessed")


def test_both_listeners_require_a_login(broker: EmbeddedBroker) -> None:
    state = broker.state
    assert state is not None
    for port in (state.port, state.controller_port):
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as other:
            other.sendall(METADATA)
            assert other.recv(1) == b""


def test_password_is_readable_only_by_its_owner_and_stored_nowhere_else(
    broker: EmbeddedBroker,
) -> None:
    assert broker.password_file is not None
    settings = broker.directory / "server.properties"
    password = broker.password_file.read_text()
    assert stat.S_IMODE(broker.directory.stat().st_mode) == 0o700
    assert (
        stat.S_IMODE(broker.password_file.stat().st_mode)
        == stat.S_IMODE(settings.stat().st_mode)
        == 0o600
    )
    node_secret = next(
        line for line in settings.read_text().splitlines() if "plain.sasl.jaas" in line
    ).split('"')[3]
    process = psutil.Process(broker.pid)
    shown = " ".join(
        [
            *process.cmdline(),
            *process.environ().values(),
            broker.log_path.read_text(),
            (broker.directory / "broker.json").read_text(),
        ]
    )
    assert len(node_secret) >= 43
    assert node_secret not in shown
    assert password not in shown
    written = [file for file in (broker.directory / "data").rglob("*") if file.is_file()]
    assert not [file for file in written if password.encode() in file.read_bytes()]


def test_client_properties_let_kafka_tools_log_in(broker: EmbeddedBroker) -> None:
    settings: dict[str, str | int | float | bool] = dict(
        line.split("=", 1)
        for line in build_client_properties(broker, form="librdkafka").splitlines()
    )
    assert AdminClient(settings).list_topics(timeout=SECONDS).brokers


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_of_any_release_logs_in_until_the_next_start(tmp_path: Path) -> None:
    """Debian 12's kcat (librdkafka 2.0.2) can't use SCRAM with Kafka 4, newer ones can."""
    settings = []
    for _ in range(2):
        with EmbeddedBroker(tmp_path / "node") as broker:
            settings.append(build_client_properties(broker, form="kcat"))
            listed = run_kcat(tmp_path, settings[-1])
            assert f"broker 1 at {broker.bootstrap_servers}" in listed.stdout, listed.stderr
            refused = run_kcat(tmp_path, settings[0])
            assert (refused.returncode != 0) == (len(settings) == 2)
    assert "invalid credentials" in refused.stderr.lower() or "Authentication failed" in (
        refused.stderr
    )


def run_kcat(folder: Path, settings: str) -> subprocess.CompletedProcess[str]:
    """List a broker's metadata with kcat and these settings."""
    file = folder / "kcat.conf"
    file.write_text(settings)
    return subprocess.run(
        ["kcat", "-F", str(file), "-L", "-m", "30"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_broker_folder_without_password_is_secured_and_keeps_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    with EmbeddedBroker(folder, has_password=False) as broker:
        assert broker.password_file is None
        bare = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        bare.create_topics([NewTopic("kept", 1, 1)])["kept"].result(SECONDS)
    with EmbeddedBroker(folder) as broker:
        assert broker.password_file is None, "it was opened on purpose, and stays so"
    state = broker.state
    assert state is not None
    write_state(
        folder / "broker.json", replace(state, login="")
    )  # as a release without passwords left it
    with EmbeddedBroker(folder) as broker:
        assert "kept" in Admin(connection(broker, broker.password_file)).topics("")
        with pytest.raises(
            AccessDenied, match="requires authentication, and this client has no credentials"
        ):
            ping(broker, None)


def test_deleted_password_is_regenerated_and_the_old_one_is_invalid(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "node") as broker:
        assert broker.password_file is not None
        old = tmp_path / "old"
        old.write_bytes(broker.password_file.read_bytes())
    (broker.directory / "password").unlink()
    with EmbeddedBroker(tmp_path / "node") as broker:
        ping(broker, broker.password_file)
        with pytest.raises(AccessDenied, match="authentication of user 'relax' failed"):
            ping(broker, old)
