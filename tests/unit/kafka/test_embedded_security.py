"""A secured embedded broker: its settings, its requirements, and that its security can't change
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.kafka.embedded.security import (
    NodeSecurity,
    choose_credentials,
    read_tool_password,
)
from relax_events.kafka.embedded.settings import build_server_properties
from relax_events.ops.security import create_folder


@pytest.fixture
def security(make_run_config: Callable[..., RunConfig], tmp_path: Path) -> NodeSecurity:
    create_folder(make_run_config(), tmp_path / "security", lifetime=timedelta(days=1))
    return NodeSecurity.from_folder(tmp_path / "security", internal_port=20003)


def settings_of(security: NodeSecurity, **overrides: str) -> dict[str, str]:
    text = build_server_properties(
        Path("/node/data"),
        port=20001,
        controller_port=20002,
        overrides=overrides,
        security=security,
    )
    return dict(line.split("=", 1) for line in text.splitlines())


def test_secured_node_requires_authentication_on_every_listener(security: NodeSecurity) -> None:
    written = settings_of(security)
    assert (
        written["listeners"]
        == "SASL_SSL://127.0.0.1:20001,INTERNAL://127.0.0.1:20003,CONTROLLER://127.0.0.1:20002"
    )
    assert (
        written["advertised.listeners"] == "SASL_SSL://127.0.0.1:20001,INTERNAL://127.0.0.1:20003"
    )
    assert (
        written["listener.security.protocol.map"] == "CONTROLLER:SSL,INTERNAL:SSL,SASL_SSL:SASL_SSL"
    )
    assert {
        written[f"listener.name.{name}.ssl.client.auth"] for name in ("internal", "controller")
    } == {"required"}


def test_secured_node_denies_access_without_an_acl(security: NodeSecurity) -> None:
    written = settings_of(security)
    assert (
        written["authorizer.class.name"]
        == "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    )
    assert (written["allow.everyone.if.no.acl.found"], written["auto.create.topics.enable"]) == (
        "false",
        "false",
    )
    assert written["super.users"] == "User:CN=relax.broker;User:relax.admin"


def test_settings_hold_no_password(security: NodeSecurity) -> None:
    secrets = [file.read_text() for file in (security.folder.path / "secrets").iterdir()]
    assert not any(secret in "".join(settings_of(security).values()) for secret in secrets)


def test_only_people_have_a_password_for_tools(security: NodeSecurity, tmp_path: Path) -> None:
    run = security.folder.usernames()[0].split(".")[1]
    text = build_server_properties(
        Path("/node/data"), port=1, controller_port=2, overrides={}, security=security
    )
    (tmp_path / "server.properties").write_text(text)
    passwords = {
        user: read_tool_password(tmp_path / "server.properties", user)
        for user in security.folder.usernames()
    }
    assert {user for user, password in passwords.items() if password} == {
        f"relax.{run}.operator",
        f"relax.{run}.reader",
    }
    assert read_tool_password(tmp_path / "server.properties", "relax.admin") is None


def test_super_users_can_not_be_overridden(security: NodeSecurity) -> None:
    with pytest.raises(ConfigError, match=r"must not set super.users"):
        build_server_properties(
            Path("/d"),
            port=1,
            controller_port=2,
            overrides={"super.users": "User:ANONYMOUS"},
            security=security,
        )


@pytest.mark.parametrize("missing", ["ca.pem", "brokers/local.pem", "secrets/relax.admin"])
def test_incomplete_security_folder_is_rejected_naming_the_missing_file(
    security: NodeSecurity, missing: str
) -> None:
    (security.folder.path / missing).unlink()
    with pytest.raises(
        ConfigError,
        match=rf"has no {Path(missing).name}; create the folder with: relax broker secure",
    ):
        NodeSecurity.from_folder(security.folder.path, internal_port=1)


def test_node_stays_secured_when_restarted_without_a_credentials_folder(tmp_path: Path) -> None:
    assert choose_credentials(None, "/etc/relax", data=tmp_path) == Path("/etc/relax")
    assert choose_credentials(Path("/etc/moved"), "/etc/relax", data=tmp_path) == Path("/etc/moved")
    assert choose_credentials(None, None, data=tmp_path) is None


def test_unsecured_node_with_records_cannot_be_secured_later(tmp_path: Path) -> None:
    assert choose_credentials(Path("/etc/relax"), None, data=tmp_path / "new") == Path("/etc/relax")
    (tmp_path / "meta.properties").touch()
    with pytest.raises(
        EnvironmentProblem,
        match=r"was created without broker.credentials and does not know their users; choose another run.directory",
    ):
        choose_credentials(Path("/etc/relax"), None, data=tmp_path)
