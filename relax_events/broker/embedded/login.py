"""The password of an embedded broker: it keeps the machine's other users out of a node that all of them can reach on the loopback interface.

Clients prove by SCRAM that they know the password in the broker's folder, and learn that the broker knows it too: a program that took the port
while the broker was down learns nothing. The node logs in to its own listeners with a secret of its own, a new one at each start.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from relax_events.broker.embedded.ports import HOST
from relax_events.broker.security.folder import PASSWORD_BYTES, read_secret, write_private
from relax_events.broker.security.scram import ScramCredential
from relax_events.broker.security.settings import LOCAL_KEY, LOCAL_PROTOCOL, LOCAL_USER, MECHANISM

PASSWORD_NAME = "password"  # noqa: S105 of the file
NODE_USER = "node"
CONTROLLER = "CONTROLLER"
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


@dataclass(frozen=True, slots=True)
class NodeLogin:
    """What a node asks of its clients, and of itself."""

    password_file: Path
    is_new: bool
    """Whether the password was made now, so that a node that was formatted before does not know it."""
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
        """Return the node's settings, over those of an open one. They hold the node's own secret."""
        clients, controller = (f"listener.name.{name.lower()}" for name in (LOCAL_PROTOCOL, CONTROLLER))
        itself = f'{_PLAIN} required username="{NODE_USER}" password="{self.node_secret}" user_{NODE_USER}="{self.node_secret}";'
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
        """Return librdkafka's settings of a client that is the node itself, and so may introduce the user to it."""
        return {"security.protocol": LOCAL_PROTOCOL, "sasl.mechanism": "PLAIN", "sasl.username": NODE_USER, "sasl.password": self.node_secret}
