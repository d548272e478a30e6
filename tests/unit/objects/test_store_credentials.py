"""Each process uses the credential of its own role, and a worker sees no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.errors import ConfigError
from relax_events.objects.credentials import (
    build_worker_store_environment,
    read_store_credential,
    remove_store_credentials,
)

KEYS = "AWS_ACCESS_KEY_ID={role}\nAWS_SECRET_ACCESS_KEY='of {role}'\nAWS_ALLOW_HTTP=true\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for role in ("trainer", "operator", "reader"):
        (tmp_path / f"{role}.env").write_text(f"# {role}\n\n" + KEYS.format(role=role))
    return tmp_path


def test_worker_reads_the_file_of_its_role(folder: Path) -> None:
    environment = build_worker_store_environment("trainer", {"OBJECTS_CREDENTIALS": str(folder)})
    assert environment == {"OBJECTS_CREDENTIALS_FILE": str(folder / "trainer.env")}
    credential = read_store_credential(environment)
    assert credential.options == {
        "aws_access_key_id": "trainer",
        "aws_secret_access_key": "of trainer",
    }
    assert credential.allows_http


@pytest.mark.parametrize(
    ("environment", "user"),
    [({}, "operator"), ({"RELAX_BROKER__PRINCIPAL": "reader"}, "reader")],
)
def test_command_is_the_operator_unless_it_says_otherwise(
    folder: Path, environment: dict[str, str], user: str
) -> None:
    credential = read_store_credential(environment | {"OBJECTS_CREDENTIALS": str(folder)})
    assert credential.options["aws_access_key_id"] == user


def test_worker_with_its_own_credential_inherits_no_other(folder: Path) -> None:
    inherited = {
        "PATH": "/bin",
        "OBJECTS_CREDENTIALS": str(folder),
        "OBJECTS_CREDENTIALS_FILE": "mine",
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "mine",
        "AWS_SESSION_TOKEN": "mine",
        "AWS_REGION": "local",
        "GOOGLE_SERVICE_ACCOUNT": "mine",
    }
    assert remove_store_credentials(inherited) == {"PATH": "/bin", "AWS_REGION": "local"}


def test_environment_is_left_alone_where_roles_share_a_credential() -> None:
    inherited = {"AWS_ACCESS_KEY_ID": "ours", "OBJECTS_CREDENTIALS_FILE": "file"}
    assert remove_store_credentials(inherited) == inherited
    assert build_worker_store_environment("trainer", inherited) == {}
    assert read_store_credential({"AWS_ACCESS_KEY_ID": "ours"}).options == {}


@pytest.mark.parametrize("role", ["rollout", "../trainer", "nurse"])
def test_role_without_a_file_is_refused(folder: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=r"has no file .*env; write the credential"):
        build_worker_store_environment(role, {"OBJECTS_CREDENTIALS": str(folder)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("AWS_ACCESS_KEY_ID=a\nPATH=/bin\n", "line 2 of"),
        ("AKIA123\n", "line 1 of"),
        ("# nothing\n", "is empty"),
    ],
)
def test_file_with_other_lines_is_refused_without_showing_them(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "file.env"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_store_credential({"OBJECTS_CREDENTIALS_FILE": str(path)})
    assert "AKIA123" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"OBJECTS_CREDENTIALS_FILE: .*gone.env can't be read"):
        read_store_credential({"OBJECTS_CREDENTIALS_FILE": str(tmp_path / "gone.env")})
