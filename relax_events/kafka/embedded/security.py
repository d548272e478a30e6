"""The password of an embedded broker: it keeps the machine's other users out of a node that all of
them can reach on the loopback interface.

Clients prove by SCRAM that they know the password in the broker's folder, and learn that the broker
knows it too: a program that took the port while the broker was down learns nothing. The node logs
in to its own listeners with a secret of its own, a new one at each start.

A secured embedded broker: what it takes from its security folder, and that it stays as it was made.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.kafka.embedded.directory import PASSWORD, BrokerState
from relax_events.kafka.embedded.ports import HOST
from relax_events.kafka.embedded.storage import is_formatted
from relax_events.kafka.security.folder import (
    ADMIN,
    LOCAL,
    PASSWORD_BYTES,
    SecurityFolder,
    read_secret,
    write_private,
)
from relax_events.kafka.security.scram import ScramCredential
from relax_events.kafka.security.settings import (
    CLIENTS,
    CONTROLLER,
    INTERNAL,
    LOCAL_KEY,
    LOCAL_PROTOCOL,
    LOCAL_USER,
    MECHANISM,
    admin_security,
    broker_security,
    local_security,
)

PASSWORD_NAME = "password"  # noqa: S105 of the file
NODE_USER = "node"
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


@dataclass(frozen=True, slots=True)
class NodeLogin:
    """What a node asks of its clients, and of itself."""

    password_file: Path
    is_new: bool
    """Whether the password was made now, so that a node that was formatted before does not know
    it."""
    node_secret: str = field(repr=False)

    @classmethod
    def of(cls, directory: Path) -> NodeLogin:
        """Take the password of a broker's folder, and make one where there is none."""
        file = directory / PASSWORD_NAME
        is_new = not file.exists()
        if is_new:
            write_private(file, secrets.token_urlsafe(PASSWORD_BYTES).encode())
        return cls(file, is_new, secrets.token_urlsafe(PASSWORD_BYTES))

    def properties(self, *, port: int, controller_port: int) -> dict[str, str]:
        """Return the node's settings, over those of an open one. They hold the node's own
        secret.
        """
        clients, controller = (
            f"listener.name.{name.lower()}" for name in (LOCAL_PROTOCOL, CONTROLLER)
        )
        itself = (
            f'{_PLAIN} required username="{NODE_USER}" password="{self.node_secret}" '
            f'user_{NODE_USER}="{self.node_secret}";'
        )
        return {
            "listeners": f"{LOCAL_PROTOCOL}://{HOST}:{port},{CONTROLLER}://{HOST}:{controller_port}",
            "advertised.listeners": f"{LOCAL_PROTOCOL}://{HOST}:{port}",
            "listener.security.protocol.map": f"{CONTROLLER}:{LOCAL_PROTOCOL},{LOCAL_PROTOCOL}:{LOCAL_PROTOCOL}",
            "inter.broker.listener.name": LOCAL_PROTOCOL,
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            f"{clients}.sasl.enabled.mechanisms": f"{MECHANISM},PLAIN",
            f"{clients}.{MECHANISM.lower()}.sasl.jaas.config": f"{_SCRAM} required;",
            f"{clients}.plain.sasl.jaas.config": itself,
            f"{controller}.sasl.enabled.mechanisms": "PLAIN",
            f"{controller}.plain.sasl.jaas.config": itself,
        }

    @property
    def password(self) -> str:
        """The password.

        Raises:
            ConfigError: Its file can't be read.
        """
        return read_secret(self.password_file, key=LOCAL_KEY)

    def credential(self) -> ScramCredential:
        """Return what the node keeps of the password."""
        return ScramCredential.of(LOCAL_USER, self.password)

    def of_node(self) -> dict[str, str]:
        """Return librdkafka's settings of a client that is the node itself, and so may introduce
        the user to it.
        """
        return {
            "security.protocol": LOCAL_PROTOCOL,
            "sasl.mechanism": "PLAIN",
            "sasl.username": NODE_USER,
            "sasl.password": self.node_secret,
        }


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """What secures a node; it needs a port more, since clients and the node itself are told apart
    by listener.
    """

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
                raise ConfigError(
                    f"broker.credentials = {str(credentials)!r} has no {file.name}; make the "
                    "folder with: relax broker secure"
                )
        return cls(folder, internal_port)

    def properties(self, *, port: int, controller_port: int) -> dict[str, str]:
        """Return the node's settings, over those of an open one."""
        return {
            **broker_security(self.folder, key_file=self.folder.broker_file(LOCAL)),
            "listeners": f"{CLIENTS}://{HOST}:{port},{INTERNAL}://{HOST}:{self.internal_port},{CONTROLLER}://{HOST}:{controller_port}",
            "advertised.listeners": f"{CLIENTS}://{HOST}:{port},{INTERNAL}://{HOST}:{self.internal_port}",
        }


def first_users(folder: SecurityFolder) -> list[ScramCredential]:
    """Return who can log in to a broker from its first moment: the super user, who makes all
    others.

    Raises:
        ConfigError: The folder has no password for it.
    """
    return [
        ScramCredential.of(
            ADMIN, read_secret(folder.password_file(ADMIN), key="broker.credentials")
        )
    ]


def kept_credentials(given: Path | None, recorded: str | None, *, data: Path) -> Path | None:
    """Return the security folder of the next start: the given one, or that of the last start.

    Raises:
        EnvironmentProblem: The node was made without security, so that nobody could log in.
    """
    if given is not None and recorded is None and is_formatted(data):
        raise EnvironmentProblem(
            f"the broker in {data.parent} was made without broker.credentials and does not "
            "know their users; "
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
