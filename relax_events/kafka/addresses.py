"""The addresses of brokers, as a user writes them."""

from __future__ import annotations

from urllib.parse import urlsplit

from relax_events.errors import ConfigError

DEFAULT_PORT = 9092


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
