"""The addresses of brokers, as a user writes them in `broker.bootstrap_servers`."""

from __future__ import annotations

from urllib.parse import urlsplit

from relax_events.errors import ConfigError

EMBEDDED = "embedded"
"""Stands for the address of the run's embedded broker."""
DEFAULT_PORT = 9092


def list_addresses(bootstrap_servers: str) -> list[str]:
    """Return the addresses of a comma-separated list."""
    return [address.strip() for address in bootstrap_servers.split(",")]


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of a broker's address as librdkafka reads it: `host:port`, `host`,
    `[IPv6]:port`, each also behind `protocol://`.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        parts = urlsplit(f"//{address.strip().rpartition('//')[2]}")
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is no address of a broker ({error}); write host:port"
        ) from error
    return parts.hostname or "", port
