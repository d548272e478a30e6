"""Who makes a request, as its head says: known before a byte of the body is read."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

BEARER = "bearer"
SMALL_BODY_BYTES = 64 * 1024
"""A body of this size costs nothing that needs a budget: the kernel holds as much for a connection
that is not read."""
JSON_ESCAPE_BYTES = 6
r"""The longest form of a byte of text in JSON: \u001f."""
FIXED_VALUES = 16_384
VALUES_PER_TOKEN = 8
"""JSON values for each token: a message of one token has a role, parts, a type and a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBound:
    """The bounds of a body.

    Attributes:
        num_bytes: As it is received.
        num_values: JSON values in it: each costs about 100 bytes, however short its text is.
    """

    num_bytes: int = SMALL_BODY_BYTES
    num_values: int = FIXED_VALUES

    @classmethod
    def of_text(cls, num_tokens: int, *, longest_token_bytes: int, media_bytes: int = 0) -> Self:
        """Return the bound of a call whose texts have a number of tokens at most.

        Args:
            num_tokens: Tokens of the context, or of all rows of a call.
            longest_token_bytes: The longest text of one token.
            media_bytes: Bytes of its media in JSON.
        """
        text_bytes = num_tokens * longest_token_bytes * JSON_ESCAPE_BYTES
        return cls(
            num_bytes=SMALL_BODY_BYTES + text_bytes + media_bytes,
            num_values=FIXED_VALUES + num_tokens * VALUES_PER_TOKEN,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The caller of a request, and the budget of its calls.

    Attributes:
        name: Unique in a server; it is no secret.
        body: The bound of a call's body.
        max_calls: Calls at once; further ones wait for their turn.
        max_bytes: Large bodies of its calls at once, until they are answered; a larger one comes
            alone.
        max_connections: Open connections.
        subject: What the identity stands for in the application, a session for example.
    """

    name: str
    body: BodyBound = BodyBound()
    max_calls: int = 64
    max_bytes: int = 32 * 1024**2
    max_connections: int = 64
    subject: object = None


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request.

    Attributes:
        method: In capitals.
        path: Without the query.
        query: Of the address, without the question mark.
        headers: By lower-case name; of a repeated header the last.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]

    @classmethod
    def from_scope(cls, scope: MutableMapping[str, Any]) -> Self:
        """Return the head of an ASGI request."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        query = scope.get("query_string", b"").decode("latin-1")
        return cls(scope.get("method", "GET"), scope.get("path", "/"), query, headers)

    @property
    def bearer(self) -> str:
        """The token of the header `Authorization`; empty without one."""
        kind, _, value = self.headers.get("authorization", "").partition(" ")
        return value if kind.lower() == BEARER else ""


Identify = Callable[[RequestHead], Identity | None]
"""Returns who makes a request; None refuses it. It reads memory, or looks for a local file, and
never waits for a peer."""


def is_same_secret(candidate: str, secret: str) -> bool:
    """Return whether two secrets are the same, in a time that does not say where they differ."""
    return hmac.compare_digest(candidate.encode("utf-8", "replace"), secret.encode())


def identify_by_token(token: str, identity: Identity) -> Identify:
    """Return the rule of a server with one token.

    Args:
        token: Of the header `Authorization`; empty lets every request in.
        identity: Of a caller with the token.
    """

    def identify(head: RequestHead) -> Identity | None:
        return identity if not token or is_same_secret(head.bearer, token) else None

    return identify


def read_identity(scope: MutableMapping[str, Any]) -> Identity:
    """Return the identity that the guard has found for a request."""
    identity: Identity = scope["state"]["identity"]
    return identity
