"""The folder that holds a cluster's secrets: who is in it, where each file lies, and that nobody
else may read them.

    ca.pem              what clients trust
    secrets/<user>      a password, one file for each principal
    ca.key, brokers/    keys of the authority and the brokers: for whoever runs the cluster, not for clients
    clients/<user>.env  what a worker needs in its environment
    acls/<run>.json     who may do what
    broker.properties   settings for a cluster of your own
    compose/<run>.json  an overlay for the container stack

`BROKER_PASSWORD` in the environment stands in for a password file where there is none.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from relax_events.errors import ConfigError
from relax_events.kafka.security.acls import PRINCIPALS, prefix_of, username_of

ADMIN = "relax.admin"
"""The super user: makes principals and ACLs, and nothing else uses it."""
LOCAL = "local"
"""Names the certificate of the embedded broker."""
PASSWORD_BYTES = 32
OWNER_ONLY = 0o600
MAX_SECRET_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class SecurityFolder:
    """Names the files of a security folder; it need not exist."""

    path: Path

    @property
    def ca_file(self) -> Path:
        """The authority's certificate."""
        return self.path / "ca.pem"

    @property
    def ca_key_file(self) -> Path:
        """The authority's private key."""
        return self.path / "ca.key"

    def broker_file(self, host: str) -> Path:
        """Return a broker's key and certificate, in one file as Kafka takes them."""
        return self.path / "brokers" / f"{host}.pem"

    def password_file(self, username: str) -> Path:
        """Return where a principal's password lies."""
        return self.path / "secrets" / username

    def environment_file(self, username: str) -> Path:
        """Return where the environment of a principal's processes is written down."""
        return self.path / "clients" / f"{username}.env"

    def acl_file(self, run_id: str) -> Path:
        """Return where a run's permissions are listed."""
        return self.path / "acls" / f"{run_id}.json"

    def overlay_file(self, run_id: str) -> Path:
        """Return the overlay that secures a run in the container stack."""
        return self.path / "compose" / f"{run_id}.json"

    @property
    def properties_file(self) -> Path:
        """Settings for the brokers of a cluster."""
        return self.path / "broker.properties"

    def username(self, run_id: str, principal: str) -> str:
        """Return the user name of a principal of a run, once its password is there.

        Raises:
            ConfigError: It is not; the text says how to make it.
        """
        name = username_of(run_id, principal)
        if not self.password_file(name).is_file():
            kind = (
                "the folder has no password for it"
                if principal in PRINCIPALS
                else f"principals are {', '.join(PRINCIPALS)}"
            )
            remedy = "make it with: relax broker secure CONFIG --out FOLDER"
            raise ConfigError(
                f"broker.credentials = {str(self.path)!r}: no principal {name!r}; {kind}; {remedy}"
            )
        return name

    def usernames(self, run_id: str) -> list[str]:
        """Return the users of a run whose passwords lie here."""
        return sorted(file.name for file in (self.path / "secrets").glob(f"{prefix_of(run_id)}*"))

    def ensure_password(self, username: str, *, renew: bool = False) -> bool:
        """Make a random password unless there is one, or in place of it; return whether one was
        made.
        """
        file = self.password_file(username)
        if file.exists() and not renew:
            return False
        write_private(file, secrets.token_urlsafe(PASSWORD_BYTES).encode())
        return True

    def forget(self, run_id: str) -> list[Path]:
        """Delete the files of a run, which are of no use once the cluster has forgotten its users;
        return them.
        """
        users = self.usernames(run_id)
        files = [
            *map(self.environment_file, users),
            self.acl_file(run_id),
            self.overlay_file(run_id),
            *map(self.password_file, users),
        ]
        there = [file for file in files if file.exists()]
        for file in there:
            file.unlink()
        return there


def write_private(file: Path, content: bytes, *, mode: int = OWNER_ONLY) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(content)
    draft.replace(file)


def read_named(file: Path, *, key: str) -> bytes:
    """Return what is in a file that a configuration key names.

    Raises:
        ConfigError: The file is missing or unreadable.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{key}: {file} can't be read: {error.strerror}; give a file that this user may read"
        ) from None


def read_secret(file: Path, *, key: str) -> str:
    """Return the secret in a file, without the line end that editors leave.

    Args:
        file: One secret.
        key: The configuration key that names the file, for errors.
    Raises:
        ConfigError: The file is missing, unreadable or empty; the text never shows what is in it.
    """
    try:
        text = read_named(file, key=key)[:MAX_SECRET_BYTES].decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{key}: {file} is not UTF-8 text; write the secret alone into it"
        ) from None
    if not text:
        raise ConfigError(f"{key}: {file} is empty; write the secret into it")
    return text
