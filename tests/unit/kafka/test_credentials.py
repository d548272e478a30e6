"""A process's broker credentials come from its security folder, its own keys or the environment,
and are never printed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import orjson
import pytest

from relax_events.config import BrokerConfig, RunConfig, load_run_config
from relax_events.errors import ConfigError
from relax_events.kafka.connection import Connection
from relax_events.kafka.security.settings import read_client_settings
from relax_events.launcher.supervisor import Supervisor
from relax_events.ops.security import create_folder
from relax_events.secret_handling import redact
from relax_events.session.principals import (
    apply_principal,
    build_worker_credentials,
    remove_credentials,
)

SECRET = "correct horse battery staple"


@pytest.fixture
def secured(make_run_config: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    config = make_run_config(
        run={"id": "demo"},
        broker={"credentials": str(tmp_path / "security"), "bootstrap_servers": "kafka-1:9093"},
    )
    create_folder(config, tmp_path / "security", lifetime=timedelta(days=1))
    return config


def password_of(config: RunConfig, username: str) -> str:
    assert config.broker.credentials is not None
    return (config.broker.credentials / "secrets" / username).read_text()


@pytest.mark.parametrize("principal", ["trainer", "operator"])
def test_process_reads_its_principal_from_the_security_folder(
    secured: RunConfig, principal: str
) -> None:
    settings = Connection.from_config(
        apply_principal(secured, principal).broker, client_id="c"
    ).settings()
    username = f"relax.demo.{principal}"
    assert {
        key: settings[key]
        for key in ("security.protocol", "sasl.mechanism", "sasl.username", "sasl.password")
    } == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": username,
        "sasl.password": password_of(secured, username),
    }
    assert Path(settings["ssl.ca.location"]).read_bytes().startswith(b"-----BEGIN CERTIFICATE-----")


def test_run_file_may_name_another_principal(secured: RunConfig) -> None:
    config = secured.model_copy(
        update={"broker": secured.broker.model_copy(update={"principal": "reader"})}
    )
    assert apply_principal(config, "operator").broker.username == "relax.demo.reader"


def test_workers_get_only_the_credentials_of_their_own_principal(
    secured: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_BROKER__CREDENTIALS", str(tmp_path / "security"))
    workers = Supervisor(apply_principal(secured, "operator"), tmp_path / "run.json")._processes
    reported = {
        name: order.environment
        for managed in workers.values()
        for name, order in managed.requests.items()
    }
    assert {
        name: reported[name]["RELAX_BROKER__USERNAME"]
        for name in ("trainer-0", "rollout-0", "metrics-0")
    } == {
        "trainer-0": "relax.demo.trainer",
        "rollout-0": "relax.demo.rollout",
        "metrics-0": "relax.demo.metrics",
    }
    (tmp_path / "run.json").write_bytes(
        orjson.dumps(
            remove_credentials(apply_principal(secured, "operator")).model_dump(mode="json")
        )
    )
    config = load_run_config(tmp_path / "run.json", environment=reported["rollout-0"])
    assert (config.broker.username, config.broker.credentials) == ("relax.demo.rollout", None)
    assert read_client_settings(config.broker)["sasl.password"] == password_of(
        secured, "relax.demo.rollout"
    )
    assert "security" not in (tmp_path / "run.json").read_text()


def test_run_without_credentials_stays_unchanged(make_run_config: Callable[..., RunConfig]) -> None:
    config = make_run_config()
    assert apply_principal(config, "trainer") is config
    assert remove_credentials(config) is config
    assert build_worker_credentials(config, "trainer") == {}
    assert read_client_settings(config.broker) == {}


def test_password_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", SECRET)
    assert read_client_settings(BrokerConfig(username="me"))["sasl.password"] == SECRET


def test_user_without_password_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROKER_PASSWORD", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"broker.username = 'me' has no password; name its file in broker.password_file, or set BROKER_PASSWORD",
    ):
        read_client_settings(BrokerConfig(username="me"))


def test_other_secrets_are_read_from_their_own_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)
    config = BrokerConfig.model_validate({"secret_files": {"ssl.key.password": tmp_path / "key"}})
    assert read_client_settings(config) == {"ssl.key.password": SECRET}


def test_secret_is_redacted_in_text_and_in_the_connection_repr(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET)
    connection = Connection.from_config(
        BrokerConfig(username="me", password_file=tmp_path / "password"), client_id="c"
    )
    assert SECRET not in repr(connection)
    assert redact(f"login of me with {SECRET} failed") == "login of me with (hidden) failed"


def test_ca_file_may_be_a_large_bundle_with_non_ascii_comments(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("# " + "ő" * 100_000 + "\n-----BEGIN CERTIFICATE-----\n")
    assert read_client_settings(BrokerConfig(ca_file=bundle)) == {"ssl.ca.location": str(bundle)}


def test_ca_file_without_a_certificate_is_rejected_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not one")
    with pytest.raises(
        ConfigError,
        match=rf"broker.ca_file: {file} holds no certificate; give the PEM file of the authority",
    ):
        read_client_settings(BrokerConfig(ca_file=file))
    file.unlink()
    with pytest.raises(
        ConfigError, match=rf"broker.ca_file: {file} can't be read: No such file or directory"
    ):
        read_client_settings(BrokerConfig(ca_file=file))
