"""The folder of a cluster's secrets: its files, their paths and their permissions.

    ca.pem              what clients trust
    secrets/<user>      a password, one file for each principal
    ca.key, brokers/    keys of the authority and the brokers: for the operator, not for clients
    clients/<user>.env  a worker's environment variables
    acls/<run>.json     the ACLs of a run
    broker.properties   settings for your own cluster

The environment variable `BROKER_PASSWORD` replaces a missing password file.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from relax_events.errors import ConfigError
from relax_events.kafka.security.acls import PRINCIPALS, build_run_prefix, build_username
from relax_events.secret_handling import write_private

ADMIN = "relax.admin"
"""The super user, used only to create principals and ACLs."""
EMBEDDED_HOST = "local"
"""The name of the embedded broker's certificate file."""
PASSWORD_BYTES = 32


@dataclass(frozen=True, slots=True)
class SecurityFolder:
    """The paths of a security folder, which need not exist."""

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
        """Return the path of a broker's key and certificate, in one PEM file as Kafka expects."""
        return self.path / "brokers" / f"{host}.pem"

    def password_file(self, username: str) -> Path:
        """Return the path of a principal's password."""
        return self.path / "secrets" / username

    def environment_file(self, username: str) -> Path:
        """Return the path of a principal's environment variables."""
        return self.path / "clients" / f"{username}.env"

    def acl_file(self, run_id: str) -> Path:
        """Return the path of a run's ACLs."""
        return self.path / "acls" / f"{run_id}.json"

    @property
    def properties_file(self) -> Path:
        """Settings for the brokers of a cluster."""
        return self.path / "broker.properties"

    def username(self, run_id: str, principal: str) -> str:
        """Return the user name of a run's principal after checking that its password exists.

        Raises:
            ConfigError: The password is missing; the text says how to create it.
        """
        name = build_username(run_id, principal)
        if not self.password_file(name).is_file():
            kind = (
                "the folder has no password for it"
                if principal in PRINCIPALS
                else f"principals are {', '.join(PRINCIPALS)}"
            )
            raise ConfigError(
                f"broker.credentials = {str(self.path)!r}: no principal {name!r}; {kind}; create "
                "it with: relax broker secure CONFIG --out FOLDER"
            )
        return name

    def usernames(self, run_id: str = "*", principal: str = "*") -> list[str]:
        """Return the users of a run, or of all, that have a password here."""
        pattern = f"{build_run_prefix(run_id)}{principal}"
        return sorted(file.name for file in (self.path / "secrets").glob(pattern))

    def ensure_password(self, username: str, *, renew: bool = False) -> bool:
        """Create a random password if it is missing or `renew` is set; return whether one was
        created.
        """
        file = self.password_file(username)
        if file.exists() and not renew:
            return False
        write_private(file, secrets.token_urlsafe(PASSWORD_BYTES).encode())
        return True

    def delete_run(self, run_id: str) -> list[Path]:
        """Delete the files of a run after the cluster has deleted its users; return their paths."""
        users = self.usernames(run_id)
        files = [
            *map(self.environment_file, users),
            self.acl_file(run_id),
            *map(self.password_file, users),
        ]
        there = [file for file in files if file.exists()]
        for file in there:
            file.unlink()
        return there
