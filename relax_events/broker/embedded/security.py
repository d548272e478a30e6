"""A secured embedded broker: what it takes from its security folder, and that it stays as it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_events.broker.embedded.ports import HOST
from relax_events.broker.embedded.state import PASSWORD, BrokerState
from relax_events.broker.embedded.storage import is_formatted
from relax_events.broker.security.folder import ADMIN, LOCAL, SecurityFolder, read_secret
from relax_events.broker.security.scram import ScramCredential
from relax_events.broker.security.settings import CLIENTS, CONTROLLER, INTERNAL, admin_security, broker_security, local_security
from relax_events.errors import ConfigError, EnvironmentProblem


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """What secures a node; it needs a port more, since clients and the node itself are told apart by listener."""

    folder: SecurityFolder
    internal_port: int

    @classmethod
    def of(cls, credentials: Path, *, internal_port: int) -> NodeSecurity:
        """Read a security folder.

        Raises:
            ConfigError: It is not one, or lacks the broker's own files.
        """
        folder = SecurityFolder(credentials.absolute())
        for file in (folder.ca_file, folder.broker_file(LOCAL), folder.password_file(ADMIN)):
            if not file.is_file():
                raise ConfigError(f"broker.credentials = {str(credentials)!r} has no {file.name}; make the folder with: relax broker secure")
        return cls(folder, internal_port)

    def properties(self, *, port: int, controller_port: int) -> dict[str, str]:
        """Return the node's settings, over those of an open one."""
        return {
            **broker_security(self.folder, key_file=self.folder.broker_file(LOCAL)),
            "listeners": f"{CLIENTS}://{HOST}:{port},{INTERNAL}://{HOST}:{self.internal_port},{CONTROLLER}://{HOST}:{controller_port}",
            "advertised.listeners": f"{CLIENTS}://{HOST}:{port},{INTERNAL}://{HOST}:{self.internal_port}",
        }


def first_users(folder: SecurityFolder) -> list[ScramCredential]:
    """Return who can log in to a broker from its first moment: the super user, who makes all others.

    Raises:
        ConfigError: The folder has no password for it.
    """
    return [ScramCredential.of(ADMIN, read_secret(folder.password_file(ADMIN), key="broker.credentials"))]


def kept_credentials(given: Path | None, recorded: str | None, *, data: Path) -> Path | None:
    """Return the security folder of the next start: the given one, or that of the last start.

    Raises:
        EnvironmentProblem: The node was made without security, so that nobody could log in.
    """
    if given is not None and recorded is None and is_formatted(data):
        raise EnvironmentProblem(
            f"the broker in {data.parent} was made without broker.credentials and does not know their users; "
            "choose another run.directory (or --directory), or leave broker.credentials out"
        )
    return given if given is not None else None if recorded is None else Path(recorded)


def readiness_settings(state: BrokerState, password_file: Path) -> dict[str, str]:
    """Return what a client needs to ask whether the node serves.

    Raises:
        ConfigError: The password can't be read.
    """
    if state.credentials is not None:
        return admin_security(SecurityFolder(Path(state.credentials)))
    return local_security(password_file) if state.login == PASSWORD else {}
