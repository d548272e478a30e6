"""Download files by URL, only from hosts that the run file allows.

A name is resolved once, all its addresses must be public, and the connection goes to one of them,
which prevents DNS rebinding. Each redirect is checked like the first URL. Limits of size and time
apply to the whole download.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from relax_events.errors import MediaError

SCHEMES = {"http": 80, "https": 443}
MAX_REDIRECTS = 3
UNICAST = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC = (ipaddress.ip_network("192.88.99.0/24"), ipaddress.ip_network("3fff::/20"))
"""6to4 relays (RFC 7526) and documentation addresses (RFC 9637), which Python's ipaddress treats as
public.
"""
REDIRECTS = (301, 302, 303, 307, 308)


def is_public(address: str) -> bool:
    """Return whether an address is public: not of this machine, not private or special."""
    parsed = ipaddress.ip_address(address)
    if parsed.version == 6 and (
        parsed not in UNICAST or parsed.sixtofour or parsed.teredo
    ):  # others embed an IPv4 address, or are special
        return False
    return (
        parsed.is_global
        and not parsed.is_multicast
        and not any(parsed in network for network in NOT_PUBLIC)
    )


@dataclass(frozen=True, slots=True)
class WebFetcher:
    """Downloads files.

    Attributes:
        hosts: Allowed hosts.
        max_bytes: Maximum size of a file.
        seconds: Deadline of a file, from name resolution to the last byte.
        may_connect: Returns whether an address is allowed; tests pass their own.
        tls: TLS settings; None for the system's default.
    """

    hosts: Collection[str]
    max_bytes: int
    seconds: float
    may_connect: Callable[[str], bool] = is_public
    tls: ssl.SSLContext | None = None

    def fetch(self, url: str, *, location: str) -> bytes:
        """Return the file at a URL.

        Args:
            url: An http or https URL.
            location: File and row, for errors.
        Raises:
            MediaError: Its host or address is not allowed, it is too large or too slow, or the
                download fails.
        """
        deadline = time.monotonic() + self.seconds
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._parse_allowed(url, location)
            try:
                response = self._request(parts, deadline, location)
            except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError too
                raise MediaError(
                    f"{location}: {_without_query(url)} can't be downloaded: "
                    f"{error or type(error).__name__}",
                    reason="not_fetched",
                ) from None
            if isinstance(response, bytes):
                return response
            url = urljoin(url, response)
        raise MediaError(
            f"{location}: {_without_query(url)} redirects again after {MAX_REDIRECTS} redirects",
            reason="not_fetched",
        )

    def _parse_allowed(self, url: str, location: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise MediaError(
                f"{location}: {_without_query(url)} is not a URL: {error}",
                reason="forbidden_address",
            ) from None
        if parts.scheme not in SCHEMES or host is None or parts.username is not None:
            raise MediaError(
                f"{location}: {_without_query(url)} must be http(s)://host/path without a login",
                reason="forbidden_address",
            )
        if host not in self.hosts:
            allowed = ", ".join(sorted(self.hosts)) or "none"
            raise MediaError(
                f"{location}: {_without_query(url)} has host {host!r}; "
                f"media_hosts allows {allowed}",
                reason="forbidden_address",
            )
        return parts

    def _request(self, parts: SplitResult, deadline: float, location: str) -> bytes | str:
        """Return a file, or the target of a redirect."""
        host, port = parts.hostname or "", parts.port or SCHEMES[parts.scheme]
        with socket.create_connection(
            (self._resolve(host, port, location), port), timeout=_seconds_left(deadline)
        ) as plain:
            secured = (
                (self.tls or ssl.create_default_context()).wrap_socket(plain, server_hostname=host)
                if parts.scheme == "https"
                else plain
            )
            connection = http.client.HTTPConnection(host, port)
            connection.sock = secured
            watch = threading.Timer(
                _seconds_left(deadline), secured.shutdown, [socket.SHUT_RDWR]
            )  # a host that sends single bytes slowly triggers no timeout
            watch.start()
            try:
                connection.request(
                    "GET",
                    parts._replace(scheme="", netloc="", fragment="").geturl() or "/",
                    headers={"Accept-Encoding": "identity"},
                )
                with connection.getresponse() as response:
                    return self._read_response(response, parts, deadline, location)
            finally:
                watch.cancel()
                connection.close()

    def _read_response(
        self, response: http.client.HTTPResponse, parts: SplitResult, deadline: float, location: str
    ) -> bytes | str:
        if response.status in REDIRECTS and (target := response.getheader("Location")):
            return target
        if response.status != http.client.OK:
            raise MediaError(
                f"{location}: {_without_query(parts.geturl())} responds "
                f"{response.status} {response.reason}",
                reason="not_fetched",
            )
        data = response.read(self.max_bytes + 1)
        _seconds_left(deadline)  # a connection that was closed at the deadline ends normally
        if len(data) > self.max_bytes:
            raise MediaError(
                f"{location} must be at most model.media.max_item_bytes = {self.max_bytes}, "
                "got more",
                reason="too_large",
            )
        return data

    def _resolve(self, host: str, port: int, location: str) -> str:
        addresses = sorted(
            {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        )
        if forbidden := [address for address in addresses if not self.may_connect(address)]:
            raise MediaError(
                f"{location}: host {host!r} is at {forbidden[0]}, which is not a public address",
                reason="forbidden_address",
            )
        return addresses[0]


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _without_query(url: str) -> str:
    """Return a URL without its query, which may hold a secret, for errors."""
    return repr(url.partition("?")[0][:200])
