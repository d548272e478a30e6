"""A minimal client of Kafka's wire protocol, for requests that librdkafka does not offer.

Source: Kafka protocol guide (request headers v1 and v2, SaslHandshake v1, SaslAuthenticate v0); RFC
5802 for SCRAM.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from relax_events.config.addresses import split_address
from relax_events.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    RelaxError,
)
from relax_events.kafka.connection import Connection

SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
SCRAM_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MAX_COMPACT = 127
Item = TypeVar("Item")
MAX_RESPONSE_BYTES = 16 * 1024 * 1024


class ResponseReader:
    """Reads the fields of a response."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read_int8(self) -> int:
        """Return the next 8-bit integer."""
        return int(self._unpack("b"))

    def read_int16(self) -> int:
        """Return the next 16-bit integer."""
        return int(self._unpack("h"))

    def read_int32(self) -> int:
        """Return the next 32-bit integer."""
        return int(self._unpack("i"))

    def read_int64(self) -> int:
        """Return the next 64-bit integer."""
        return int(self._unpack("q"))

    def read_uuid(self) -> bytes:
        """Return the 16 bytes of the next UUID."""
        value: bytes = self._unpack("16s")
        return value

    def read_string(self) -> str | None:
        """Return the next string; None for null."""
        length = self.read_int16()
        return None if length < 0 else self._read(length).decode()

    def read_bytes(self) -> bytes:
        """Return the next byte string."""
        return self._read(self.read_int32())

    def read_array(self, item: Callable[[], Item]) -> list[Item]:
        """Return the next array; `item` reads one element."""
        return [item() for _ in range(self.read_int32())]

    def read_compact_string(self) -> str | None:
        """Return the next compact string of a flexible response; None for null."""
        length = self._read_varint()
        return self._read(length - 1).decode() if length else None

    def read_compact_array(self, item: Callable[[], Item]) -> list[Item]:
        """Return the next compact array of a flexible response; `item` reads one element."""
        return [item() for _ in range(self._read_varint() - 1)]

    def skip_tagged_fields(self) -> None:
        """Skip the tagged fields that end each structure of a flexible response."""
        for _ in range(self._read_varint()):
            self._read_varint()
            self._read(self._read_varint())

    def _read_varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = int(self._unpack("B"))
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def _unpack(self, form: str) -> Any:
        (value,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(f">{form}")
        return value

    def _read(self, length: int) -> bytes:
        value = self._data[self._at : self._at + length]
        self._at += length
        return value


def encode_string(value: str | None) -> bytes:
    """Encode a string of a request."""
    encoded = b"" if value is None else value.encode()
    return struct.pack(">h", -1 if value is None else len(encoded)) + encoded


def encode_compact_string(value: str | None) -> bytes:
    """Encode a compact string of a flexible request; strings here are short enough for a one-byte
    length.
    """
    encoded = b"" if value is None else value.encode()
    length = 0 if value is None else len(encoded) + 1
    if length > MAX_COMPACT:
        raise ValueError(
            f"compact strings here have at most {MAX_COMPACT - 1} bytes, got {length - 1}"
        )
    return bytes([length]) + encoded


def encode_array(items: list[bytes]) -> bytes:
    """Encode an array of a request."""
    return struct.pack(">i", len(items)) + b"".join(items)


class KafkaProtocolClient:
    """A connection to the first broker that accepts, authenticated like librdkafka's clients. Use
    it as a context manager.
    """

    def __init__(self, connection: Connection, *, should_explain: bool = True) -> None:
        """Create the client.

        Args:
            connection: The brokers.
            should_explain: Whether to find out, by further requests, why no broker accepts.
        """
        self._settings = connection.settings()
        self._connection, self._should_explain = connection, should_explain
        self._stack = ExitStack()
        self._correlation_id = 0

    def __enter__(self) -> Self:
        """Connect and authenticate.

        Raises:
            BrokerUnavailable: No broker accepts the connection.
            BrokerRefused: The broker denies access.
        """
        what = f"reaching {self._connection.bootstrap_servers}"
        try:
            self._socket = self._stack.enter_context(self._connect())
            if "SASL" in self._protocol:
                self._log_in()
        except OSError as error:
            self._stack.close()
            refusal = self._connection.find_refusal(what) if self._should_explain else None
            raise refusal or BrokerUnavailable(
                f"{what}: {error}; see that the broker runs"
            ) from error
        except RelaxError:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def _protocol(self) -> str:
        return str(self._settings.get("security.protocol", "PLAINTEXT")).upper()

    def _connect(self) -> socket.socket:
        failure: OSError = OSError("no address is configured")
        for address in self._connection.addresses:
            host, port = split_address(address)
            try:
                plain = socket.create_connection(
                    (host, port), timeout=self._connection.request_timeout_seconds
                )
                if "SSL" not in self._protocol:
                    return plain
                context = ssl.create_default_context(cafile=self._settings.get("ssl.ca.location"))
                if certificate := self._settings.get("ssl.certificate.location"):
                    context.load_cert_chain(
                        certificate,
                        self._settings.get("ssl.key.location"),
                        self._settings.get("ssl.key.password"),
                    )
                return context.wrap_socket(plain, server_hostname=host)
            except OSError as error:
                failure = error
        raise failure

    def request(
        self,
        api_key: int,
        version: int,
        body: bytes,
        *,
        is_flexible: bool = False,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> ResponseReader:
        """Send a request and return its response.

        Args:
            api_key: The API key.
            version: The request's version.
            body: The request after its header.
            is_flexible: Whether this version is flexible, so that headers have (empty) tagged
                fields.
            max_bytes: The largest accepted response.
        Raises:
            BrokerUnavailable: The connection broke, or no response arrived in time.
        """
        self._correlation_id += 1
        message = (
            struct.pack(">hhi", api_key, version, self._correlation_id)
            + encode_string(self._connection.client_id)
            + b"\0" * is_flexible
            + body
        )
        try:
            self._socket.sendall(struct.pack(">i", len(message)) + message)
            (length,) = struct.unpack(">i", self._receive(4))
            if not 4 <= length <= max_bytes:
                raise BrokerError(
                    f"the broker's response to request {api_key} claims {length} bytes; is "
                    "this a Kafka broker?"
                )
            response = ResponseReader(self._receive(length))
        except OSError as error:
            raise BrokerUnavailable(
                f"request {api_key} got no response: {error}; check that the broker runs"
            ) from error
        response.read_int32()
        if is_flexible:
            response.read_int8()
        return response

    def _receive(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            part = self._socket.recv(num_bytes - len(received))
            if not part:
                raise ConnectionResetError("the broker closed the connection")
            received += part
        return bytes(received)

    def _log_in(self) -> None:
        mechanism = str(
            self._settings.get("sasl.mechanism", self._settings.get("sasl.mechanisms", ""))
        )
        user, password = (
            str(self._settings.get("sasl.username", "")),
            str(self._settings.get("sasl.password", "")),
        )
        if mechanism not in SCRAM_HASHES and mechanism != "PLAIN":
            mechanisms = ", ".join([*SCRAM_HASHES, "PLAIN"])
            raise ConfigError(
                f"this command supports {mechanisms}, got sasl.mechanism = {mechanism!r}; use "
                "Kafka's own kafka-configs"
            )
        if error := self.request(SASL_HANDSHAKE, 1, encode_string(mechanism)).read_int16():
            raise BrokerRefused(
                f"the broker does not offer {mechanism} (error {error}); set sasl.mechanism "
                "in broker.client"
            )
        if mechanism == "PLAIN":
            self._authenticate(f"\0{user}\0{password}".encode(), user)
        else:
            self._scram(SCRAM_HASHES[mechanism], user, password)

    def _authenticate(self, token: bytes, user: str) -> bytes:
        response = self.request(SASL_AUTHENTICATE, 0, struct.pack(">i", len(token)) + token)
        if response.read_int16():
            raise BrokerRefused(
                f"authentication of user {user!r} failed: {response.read_string()}; see "
                "broker.username and "
                "broker.password_file"
            )
        response.read_string()
        return response.read_bytes()

    def _scram(self, algorithm: str, user: str, password: str) -> None:
        name = user.replace("=", "=3D").replace(",", "=2C")
        first = f"n={name},r={secrets.token_urlsafe(24)}"
        server_first = self._authenticate(f"n,,{first}".encode(), user).decode()
        fields = dict(field.split("=", 1) for field in server_first.split(","))
        salted = hashlib.pbkdf2_hmac(
            algorithm, password.encode(), base64.b64decode(fields["s"]), int(fields["i"])
        )
        bare = f"c=biws,r={fields['r']}"
        signed = f"{first},{server_first},{bare}".encode()
        client_key = hmac.digest(salted, b"Client Key", algorithm)
        signature = hmac.digest(hashlib.new(algorithm, client_key).digest(), signed, algorithm)
        proof = bytes(left ^ right for left, right in zip(client_key, signature, strict=True))
        final = self._authenticate(f"{bare},p={base64.b64encode(proof).decode()}".encode(), user)
        expected = hmac.digest(hmac.digest(salted, b"Server Key", algorithm), signed, algorithm)
        if final != b"v=" + base64.b64encode(expected):
            raise BrokerRefused(
                f"the broker did not prove that it knows the password of {user!r}; is this "
                "the right cluster?"
            )
