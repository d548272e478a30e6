"""What a container of the stack reaches: tried from inside, by the addresses that the engine knows
of the others.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.stack.container_engine import PROJECT, Engine, StackError

PYTHON = "/opt/relax/bin/python"
SERVICES = {"kafka": 9092, "prometheus": 9090, "alertmanager": 9093}
"""Services that are up, and the port of each."""
BROKER = "kafka"
CLOSED = f"{PROJECT}_scoring"
ELSEWHERE = "203.0.113.1"
"""Of those that documents use; where nothing answers, it proves nothing."""
ATTEMPTS = """
import json, socket, sys
for host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), 3).close()
        print("reached")
    except OSError as error:
        print(type(error).__name__)
"""


@dataclass(frozen=True)
class Address:
    """An address that something listens at, and what it is."""

    name: str
    host: str
    port: int
    is_closed: bool = False
    """Whether the address is of a network that only its members have: elsewhere nobody's, or
    somebody else's."""


def addresses(engine: Engine, host_port: int) -> list[Address]:
    """Return where the stack's services and this machine can be looked for: by name and in every
    network.

    Args:
        engine: Whose services are up.
        host_port: Of a server of this machine that listens on every address.
    """
    found = [Address(f"{service} by its name", service, port) for service, port in SERVICES.items()]
    gateways = {}
    for service, port in SERVICES.items():
        (container,) = engine.containers(service)
        for network, of in engine.networks(container).items():
            found.append(
                Address(
                    f"{service} in {network.removeprefix(f'{PROJECT}_')}",
                    of["IPAddress"],
                    port,
                    network == CLOSED,
                )
            )
            gateways[network] = of["Gateway"] or _first_address(engine, network)
    found += [
        Address(
            f"this machine in {network.removeprefix(f'{PROJECT}_')}",
            host,
            host_port,
            network == CLOSED,
        )
        for network, host in gateways.items()
    ]
    return [
        *found,
        Address("this machine by its own address", own_address(), host_port),
        Address("an address elsewhere", ELSEWHERE, 443),
    ]


def _first_address(engine: Engine, network: str) -> str:
    """Return where the machine would be in a network: its first address."""
    (config,) = json.loads(
        engine.docker("network", "inspect", "--format", "{{json .IPAM.Config}}", network)
    )
    return str(
        config.get("Gateway") or config["Subnet"].partition("/")[0].rpartition(".")[0] + ".1"
    )


def own_address() -> str:
    """Return the address that this machine has towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        return str(one.getsockname()[0])


@contextmanager
def listening() -> Iterator[int]:
    """Listen on every address of this machine; give the port."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def reached(engine: Engine, service: str, tried: list[Address]) -> list[bool]:
    """Connect to addresses out of a new container of a service; tell which answered.

    Raises:
        StackError: The container could not be run.
    """
    given = json.dumps([(address.host, address.port) for address in tried])
    said = engine.compose(
        "run", "--rm", "-T", "--no-deps", "--entrypoint", PYTHON, service, "-c", ATTEMPTS, given
    ).split()
    if len(said) != len(tried):
        raise StackError(f"{service} has tried {len(said)} of {len(tried)} addresses")
    return [word == "reached" for word in said]
