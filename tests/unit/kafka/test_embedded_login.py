"""The password of an embedded broker: how it is generated, checked by the node, and given to other
tools.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from relax_events.config import BrokerConfig
from relax_events.errors import BrokerUnavailable, ConfigError
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.embedded.directory import BrokerState, write_state
from relax_events.kafka.embedded.security import NodeLogin
from relax_events.kafka.embedded.settings import build_server_properties
from relax_events.kafka.embedded.tool_login import build_client_properties
from relax_events.kafka.security.settings import read_client_settings


def test_password_is_random_readable_by_owner_only_and_persistent(tmp_path: Path) -> None:
    first, second, other = (
        NodeLogin.from_directory(tmp_path / "a"),
        NodeLogin.from_directory(tmp_path / "a"),
        NodeLogin.from_directory(tmp_path / "b"),
    )
    assert (first.is_new, second.is_new, other.is_new) == (True, False, True)
    assert first.password == second.password != other.password
    assert len(first.password) >= 43  # 32 bytes, six bits a letter
    assert stat.S_IMODE(first.password_file.stat().st_mode) == 0o600
    assert first.node_secret not in (second.node_secret, first.password)


def test_all_listeners_require_login_and_settings_omit_the_password(
    tmp_path: Path,
) -> None:
    login = NodeLogin.from_directory(tmp_path)
    text = build_server_properties(
        Path("/node/data"), port=20001, controller_port=20002, overrides={}, security=login
    )
    written = dict(line.split("=", 1) for line in text.splitlines())
    protocols = dict(
        pair.split(":") for pair in written["listener.security.protocol.map"].split(",")
    )
    listeners = dict(one.split("://") for one in written["listeners"].split(","))
    assert listeners == {"SASL_PLAINTEXT": "127.0.0.1:20001", "CONTROLLER": "127.0.0.1:20002"}
    assert {protocols[name] for name in listeners} == {"SASL_PLAINTEXT"}
    assert written["listener.name.controller.sasl.enabled.mechanisms"] == "PLAIN"
    assert login.password not in text
    assert login.node_secret not in repr(login)


def broker_of(folder: Path, state: BrokerState) -> EmbeddedBroker:
    NodeLogin.from_directory(folder)
    write_state(folder / "broker.json", state)
    return EmbeddedBroker(folder)


def test_client_properties_contain_the_login_settings(tmp_path: Path) -> None:
    broker = broker_of(tmp_path, BrokerState(20001, 20002, "4.3.1", login="password"))
    password = (tmp_path / "password").read_text()
    java = dict(
        line.split("=", 1) for line in build_client_properties(broker, form="java").splitlines()
    )
    assert java["sasl.jaas.config"].endswith(
        f'ScramLoginModule required username="relax" password="{password}";'
    )
    others = dict(
        line.split("=", 1)
        for line in build_client_properties(broker, form="librdkafka").splitlines()
    )
    table = BrokerConfig(
        bootstrap_servers="127.0.0.1:20001", embedded_password_file=tmp_path / "password"
    )
    assert others == {"bootstrap.servers": "127.0.0.1:20001"} | read_client_settings(table)
    with pytest.raises(ConfigError, match="leave --principal out"):
        build_client_properties(broker, form="java", principal="relax.mine.reader")


def test_kcat_gets_the_password_of_the_running_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = broker_of(tmp_path, BrokerState(20001, 20002, "4.3.1", login="password"))
    with pytest.raises(BrokerUnavailable, match="does not run, and kcat's password is a new one"):
        build_client_properties(broker, form="kcat")
    login = NodeLogin.from_directory(tmp_path)
    text = build_server_properties(
        Path("/node/data"), port=20001, controller_port=20002, overrides={}, security=login
    )
    (tmp_path / "server.properties").write_text(text)
    monkeypatch.setattr(EmbeddedBroker, "is_running", True)
    shown = build_client_properties(broker, form="kcat").splitlines()
    assert {"sasl.mechanism=PLAIN", f"sasl.password={login.tool_secret}"} <= set(shown)
    assert len({login.tool_secret, login.node_secret, login.password}) == 3
    clients, controller = (
        next(line for line in text.splitlines() if line.startswith(f"listener.name.{name}.plain"))
        for name in ("sasl_plaintext", "controller")
    )
    assert login.tool_secret in clients
    assert login.tool_secret not in controller


def test_client_properties_need_a_principal_only_for_a_secured_broker(
    tmp_path: Path,
) -> None:
    opened = broker_of(tmp_path, BrokerState(20001, 20002, "4.3.1", login="open"))
    assert build_client_properties(opened, form="java") == "bootstrap.servers=127.0.0.1:20001\n"
    secured = broker_of(tmp_path, BrokerState(20001, 20002, "4.3.1", credentials="/etc/relax"))
    assert secured.password_file is None
    with pytest.raises(
        ConfigError,
        match=r"accepts the principals of /etc/relax, got ''; name one with --principal: it has none; see docs/how-to/secure",
    ):
        build_client_properties(secured, form="java")


def test_embedded_broker_password_is_rejected_for_clusters(tmp_path: Path) -> None:
    BrokerConfig(bootstrap_servers="127.0.0.1:1,localhost:2", embedded_password_file=tmp_path)
    with pytest.raises(
        ValidationError,
        match=r"is for embedded brokers, which are at 127.0.0.1, got 'kafka-1:9092'; for a cluster set broker.username",
    ):
        BrokerConfig(bootstrap_servers="127.0.0.1:1,kafka-1:9092", embedded_password_file=tmp_path)
    for remote in ("kafka-1", "SASL_PLAINTEXT://kafka-1"):  # librdkafka connects to port 9092
        with pytest.raises(ValidationError, match=f"got '{remote}'"):
            BrokerConfig(bootstrap_servers=remote, embedded_password_file=tmp_path)


def test_missing_password_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"broker.embedded_password_file: .*/none can't be read: No such file"
    ):
        read_client_settings(
            BrokerConfig(bootstrap_servers="127.0.0.1:1", embedded_password_file=tmp_path / "none")
        )
