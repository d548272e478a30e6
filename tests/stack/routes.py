"""Check from inside a container which addresses of the stack it reaches."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.stack.container_engine import PROJECT, ContainerEngine, StackError

PYTHON = "/opt/relax/bin/python"
SERVICES = {"kafka": 9092, "prometheus": 9090, "alertmanager": 9093}
"""Port of each running service."""
BROKER = "kafka"
CLOSED = f"{PROJECT}_scoring"
ELSEWHERE = "203.0.113.1"
"""An address reserved for documentation; without a network route the check proves nothing."""
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
    """A named address with a listener."""

    name: str
    host: str
    port: int
    is_closed: bool = False
    """Whether the address is in a network that only its members can reach."""


def addresses(engine: ContainerEngine, host_port: int) -> list[Address]:
    """Return the addresses of the stack's services and of this machine: by name and in every
    network.

    Args:
        engine: The engine with the running services. host_port: Port of a server on this machine
            that listens on every address.
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


def _first_address(engine: ContainerEngine, network: str) -> str:
    """Return the machine's address in a network: the first one."""
    (config,) = json.loads(
        engine.docker("network", "inspect", "--format", "{{json .IPAM.Config}}", network)
    )
    return str(
        config.get("Gateway") or config["Subnet"].partition("/")[0].rpartition(".")[0] + ".1"
    )


def own_address() -> str:
    """Return this machine's outbound address; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        return str(one.getsockname()[0])


@contextmanager
def listening() -> Iterator[int]:
    """Listen on every address of this machine; yield the port."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def reached(engine: ContainerEngine, service: str, tried: list[Address]) -> list[bool]:
    """Connect to addresses from a new container of a service; return which accepted.

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
