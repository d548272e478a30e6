"""Security of an embedded broker: a password for its clients, or a security folder with principals.

The password keeps other users of the machine out of a node that they can reach on the loopback
interface. Clients authenticate by SCRAM, which also proves that the broker knows the password: a
program that took the port while the broker was down learns nothing. The node authenticates to its
own listeners with a separate secret, a new one at each start.

Tools on librdkafka before 2.6.1 can't use SCRAM (confluentinc/librdkafka#4895). They authenticate
by PLAIN, which sends the password: so it is another one, a new one at each start. A program that
took the port while the broker was down learns a password that no broker accepts any more.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.kafka.embedded.directory import PASSWORD, BrokerState
from relax_events.kafka.embedded.ports import HOST
from relax_events.kafka.embedded.storage import is_formatted
from relax_events.kafka.security.folder import ADMIN, EMBEDDED_HOST, PASSWORD_BYTES, SecurityFolder
from relax_events.kafka.security.scram import ScramCredential
from relax_events.kafka.security.settings import (
    CLIENTS,
    CONTROLLER,
    EMBEDDED_LOGIN_KEY,
    EMBEDDED_PROTOCOL,
    EMBEDDED_USER,
    INTERNAL,
    MECHANISM,
    build_broker_settings,
    read_admin_settings,
    read_embedded_client_settings,
)
from relax_events.secret_handling import read_configured_file, read_secret, write_private

PASSWORD_NAME = "password"  # noqa: S105 the name of the file
NODE_USER = "node"
TOOL_PRINCIPALS = ("operator", "reader")
"""The principals of a security folder that people use, with a PLAIN password of each start."""
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


@dataclass(frozen=True, slots=True)
class NodeLogin:
    """Password authentication of a node's clients, and of the node to itself."""

    password_file: Path
    is_new: bool
    """Whether the password was created just now, so that a node that was formatted before does not
    know it."""
    node_secret: str = field(repr=False)
    tool_secret: str = field(repr=False)

    @classmethod
    def from_directory(cls, directory: Path) -> NodeLogin:
        """Read the password of a broker's folder, and create one if it is missing."""
        file = directory / PASSWORD_NAME
        is_new = not file.exists()
        if is_new:
            write_private(file, secrets.token_urlsafe(PASSWORD_BYTES).encode())
        return cls(file, is_new, _create_secret(), _create_secret())

    def properties(self, *, port: int, controller_port: int) -> dict[str, str]:
        """Return the node's security settings, which contain the secrets of this start."""
        clients, controller = (
            f"listener.name.{name.lower()}" for name in (EMBEDDED_PROTOCOL, CONTROLLER)
        )
        itself = {NODE_USER: self.node_secret}
        return {
            "listeners": f"{EMBEDDED_PROTOCOL}://{HOST}:{port},{CONTROLLER}://{HOST}:{controller_port}",
            "advertised.listeners": f"{EMBEDDED_PROTOCOL}://{HOST}:{port}",
            "listener.security.protocol.map": (
                f"{CONTROLLER}:{EMBEDDED_PROTOCOL},{EMBEDDED_PROTOCOL}:{EMBEDDED_PROTOCOL}"
            ),
            "inter.broker.listener.name": EMBEDDED_PROTOCOL,
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            f"{clients}.sasl.enabled.mechanisms": f"{MECHANISM},PLAIN",
            f"{clients}.{MECHANISM.lower()}.sasl.jaas.config": f"{_SCRAM} required;",
            f"{clients}.plain.sasl.jaas.config": _build_plain_login(
                itself | {EMBEDDED_USER: self.tool_secret}, itself=NODE_USER
            ),
            f"{controller}.sasl.enabled.mechanisms": "PLAIN",
            f"{controller}.plain.sasl.jaas.config": _build_plain_login(itself, itself=NODE_USER),
        }

    @property
    def password(self) -> str:
        """The password.

        Raises:
            ConfigError: The password file can't be read.
        """
        return read_secret(self.password_file, key=EMBEDDED_LOGIN_KEY)

    def credential(self) -> ScramCredential:
        """Return the SCRAM credential that the node stores."""
        return ScramCredential.derive(EMBEDDED_USER, self.password)

    def node_client_settings(self) -> dict[str, str]:
        """Return librdkafka's settings of a client that authenticates as the node, to register the
        user.
        """
        return {
            "security.protocol": EMBEDDED_PROTOCOL,
            "sasl.mechanism": "PLAIN",
            "sasl.username": NODE_USER,
            "sasl.password": self.node_secret,
        }


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """Security settings of a node with principals. The node uses a separate listener, and therefore
    one more port.
    """

    folder: SecurityFolder
    internal_port: int

    @classmethod
    def from_folder(cls, credentials: Path, *, internal_port: int) -> NodeSecurity:
        """Open a security folder.

        Raises:
            ConfigError: The folder lacks the broker's files.
        """
        folder = SecurityFolder(credentials.absolute())
        for file in (
            folder.ca_file,
            folder.broker_file(EMBEDDED_HOST),
            folder.password_file(ADMIN),
        ):
            if not file.is_file():
                raise ConfigError(
                    f"broker.credentials = {str(credentials)!r} has no {file.name}; create "
                    "the folder with: relax broker secure"
                )
        return cls(folder, internal_port)

    def properties(self, *, port: int, controller_port: int) -> dict[str, str]:
        """Return the node's security settings, which contain the secrets of this start."""
        users = [user for name in TOOL_PRINCIPALS for user in self.folder.usernames(principal=name)]
        tools = f"listener.name.{CLIENTS.lower()}"
        return {
            **build_broker_settings(self.folder, key_file=self.folder.broker_file(EMBEDDED_HOST)),
            f"{tools}.sasl.enabled.mechanisms": f"{MECHANISM},PLAIN",
            f"{tools}.plain.sasl.jaas.config": _build_plain_login(
                {user: _create_secret() for user in users}
            ),
            "listeners": f"{CLIENTS}://{HOST}:{port},{INTERNAL}://{HOST}:{self.internal_port},{CONTROLLER}://{HOST}:{controller_port}",
            "advertised.listeners": f"{CLIENTS}://{HOST}:{port},{INTERNAL}://{HOST}:{self.internal_port}",
        }


def _create_secret() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)


def _build_plain_login(users: Mapping[str, str], *, itself: str = "") -> str:
    """Return the JAAS entry of a listener that accepts these users' passwords by PLAIN; as `itself`
    the node authenticates.
    """
    node = f' username="{itself}" password="{users[itself]}"' if itself else ""
    accepted = "".join(f' user_{user}="{secret}"' for user, secret in users.items())
    return f"{_PLAIN} required{node}{accepted};"


def read_tool_password(properties_file: Path, username: str) -> str | None:
    """Return the PLAIN password of a user in the settings of a node's last start; None without
    one.
    """
    settings = read_configured_file(properties_file, key="--client-config kcat").decode()
    # spaces are escaped in this file
    entry = re.search(rf'u0020user_{re.escape(username)}="([^"]+)"', settings)
    return entry and entry[1]


def read_bootstrap_users(folder: SecurityFolder) -> list[ScramCredential]:
    """Return the users of a newly formatted broker: only the super user, which creates all others.

    Raises:
        ConfigError: The folder has no password for it.
    """
    return [
        ScramCredential.derive(
            ADMIN, read_secret(folder.password_file(ADMIN), key="broker.credentials")
        )
    ]


def choose_credentials(folder: Path | None, recorded: str | None, *, data: Path) -> Path | None:
    """Return the security folder of the next start: the given one, or that of the last start.

    Raises:
        EnvironmentProblem: The node was formatted without a security folder, so no principal could
            authenticate.
    """
    if folder is not None and recorded is None and is_formatted(data):
        raise EnvironmentProblem(
            f"the broker in {data.parent} was created without broker.credentials and does "
            "not know their users; "
            "choose another run.directory (or --directory), or leave broker.credentials out"
        )
    return folder if folder is not None else None if recorded is None else Path(recorded)


def read_readiness_settings(state: BrokerState, password_file: Path) -> dict[str, str]:
    """Return the client settings with which a start checks whether the node is ready.

    Raises:
        ConfigError: The password can't be read.
    """
    if state.credentials is not None:
        return read_admin_settings(SecurityFolder(Path(state.credentials)))
    return read_embedded_client_settings(password_file) if state.login == PASSWORD else {}
