"""The security folder: files that only their owner can read, created once, renewed on request, and
secrets never printed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import orjson
import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.kafka.security.acls import PRINCIPALS, build_acls
from relax_events.kafka.security.folder import ADMIN, EMBEDDED_HOST, SecurityFolder
from relax_events.ops.security import Renewal, create_folder
from relax_events.secret_handling import read_secret

YEAR = timedelta(days=365)
READABLE_BY_ALL = {"ca.pem"}


@pytest.fixture
def config(make_run_config: Callable[..., RunConfig]) -> RunConfig:
    return make_run_config(run={"id": "demo"})


@pytest.fixture
def folder(config: RunConfig, tmp_path: Path) -> SecurityFolder:
    create_folder(config, tmp_path / "security", lifetime=YEAR)
    return SecurityFolder(tmp_path / "security")


def files_of(folder: SecurityFolder) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder.path)): file.read_bytes()
        for file in folder.path.rglob("*")
        if file.is_file()
    }


def passwords_of(folder: SecurityFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder.path / "secrets").iterdir()}


def test_folder_has_a_password_of_its_own_for_every_principal(folder: SecurityFolder) -> None:
    passwords = passwords_of(folder)
    assert set(passwords) == {ADMIN, *(f"relax.demo.{principal}" for principal in PRINCIPALS)}
    assert len(set(passwords.values())) == len(passwords)
    assert {len(password) for password in passwords.values()} == {43}  # 32 random bytes in base64


def test_security_folder_is_readable_only_by_its_owner(folder: SecurityFolder) -> None:
    modes = {
        file.name: file.stat().st_mode & 0o077 for file in folder.path.rglob("*") if file.is_file()
    }
    assert {name for name, mode in modes.items() if mode} == READABLE_BY_ALL
    assert folder.path.stat().st_mode & 0o077 == 0


def test_passwords_are_stored_only_in_the_secrets_folder(folder: SecurityFolder) -> None:
    secrets = set(passwords_of(folder).values())
    elsewhere = {
        name: content
        for name, content in files_of(folder).items()
        if not name.startswith("secrets/")
    }
    assert [
        name for name, content in elsewhere.items() if any(secret in content for secret in secrets)
    ] == []


def test_environment_of_a_role_names_its_own_files(folder: SecurityFolder) -> None:
    lines = folder.environment_file("relax.demo.reward").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines) == {
        "RELAX_BROKER__USERNAME": "relax.demo.reward",
        "RELAX_BROKER__PASSWORD_FILE": str(folder.path / "secrets/relax.demo.reward"),
        "RELAX_BROKER__CA_FILE": str(folder.path / "ca.pem"),
    }


def test_acls_are_exported_as_json_for_other_tools(folder: SecurityFolder) -> None:
    listed = orjson.loads(folder.acl_file("demo").read_bytes())
    assert [(row["username"], row["name"], row["operation"]) for row in listed] == [
        (a.username, a.name, a.operation) for a in build_acls("demo")
    ]
    assert {(row["host"], row["permission"]) for row in listed} == {("*", "allow")}


def test_creating_the_security_folder_again_changes_nothing(
    folder: SecurityFolder, config: RunConfig
) -> None:
    before = files_of(folder)
    assert create_folder(config, folder.path, lifetime=YEAR) == []
    assert files_of(folder) == before


def test_second_run_and_host_are_added_without_changing_existing_files(
    folder: SecurityFolder, make_run_config: Callable[..., RunConfig]
) -> None:
    before = files_of(folder)
    create_folder(
        make_run_config(run={"id": "other"}), folder.path, hosts=["kafka-1.example"], lifetime=YEAR
    )
    after = files_of(folder)
    assert {name: after[name] for name in before} == before
    assert folder.usernames("other") == sorted(
        f"relax.other.{principal}" for principal in PRINCIPALS
    )
    assert "brokers/kafka-1.example.pem" in after


def test_renewal_replaces_only_the_selected_credentials(
    folder: SecurityFolder, config: RunConfig
) -> None:
    before = (
        passwords_of(folder),
        folder.broker_file(EMBEDDED_HOST).read_bytes(),
        folder.ca_file.read_bytes(),
    )
    create_folder(config, folder.path, lifetime=YEAR, renewal=Renewal(passwords=True))
    passwords = passwords_of(folder)
    assert passwords[ADMIN] == before[0][ADMIN]
    assert all(passwords[name] != before[0][name] for name in passwords if name != ADMIN)
    create_folder(config, folder.path, lifetime=YEAR, renewal=Renewal(certificates=True))
    assert folder.broker_file(EMBEDDED_HOST).read_bytes() != before[1]
    assert folder.ca_file.read_bytes() == before[2]


def test_certificate_creation_fails_without_the_ca_key(
    folder: SecurityFolder, config: RunConfig
) -> None:
    folder.ca_key_file.unlink()
    with pytest.raises(
        ConfigError, match=r"ca.key is not there, so certificates for kafka-9 can't be signed"
    ):
        create_folder(config, folder.path, hosts=["kafka-9"], lifetime=YEAR)


def test_unknown_principal_is_rejected_listing_the_existing_ones(folder: SecurityFolder) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no principal 'relax.demo.king'; principals are prompter, .*; create it with: relax broker secure",
    ):
        folder.username("demo", "king")
    with pytest.raises(
        ConfigError, match=r"no principal 'relax.else.trainer'; the folder has no password for it"
    ):
        folder.username("else", "trainer")


@pytest.mark.parametrize(
    "content", [b"hunter2-hunter2\n", b"hunter2-hunter2", b"hunter2-hunter2\r\n"]
)
def test_secret_is_read_without_its_trailing_newline(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "password").write_bytes(content)
    assert read_secret(tmp_path / "password", key="broker.password_file") == "hunter2-hunter2"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "can't be read: No such file"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_error_names_key_and_file_of_an_unusable_secret(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / "password").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"broker.password_file: .*password {text}"):
        read_secret(tmp_path / "password", key="broker.password_file")
