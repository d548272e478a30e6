"""The callers of the gateway: a program by the key of its session, a harness by the token, or a
client of a model without a run.

The key stands in the header of either vendor, since a proxy between the program and the gateway may
overwrite one header. The guard looks the key up once, before a call's body is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.exceptions import HTTPException

from relax_events.api.http import Identity, RequestHead, is_same_secret, read_identity
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.offers import SessionOffers
from relax_events.packages.gateway.sampling import CallSampling

NO_KEY = "no key, or none of an open session"
MAX_HARNESS_CALLS = 4096
"""At once: each process of a harness waits for a session in one."""


@dataclass(frozen=True, slots=True)
class Harness:
    """A harness with the token, which may take sessions."""


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """A session that its harness has finished, and asks for again."""

    key: str


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An open session, and its key."""

    key: str
    session: ChatSession


@dataclass(frozen=True, slots=True)
class ModelClient:
    """A client of a model without a run: each of its calls is a session."""

    open_session: Callable[[CallSampling], ChatSession]


class SessionKeys:
    """The open sessions by key."""

    def __init__(self) -> None:
        self._identities: dict[str, Identity] = {}

    def open(self, session: ChatSession) -> str:
        """Add a session, and return its key."""
        key = f"relax-{secrets.token_urlsafe(24)}"
        name = f"session {session.sample.sample_id} {secrets.token_hex(4)}"
        self._identities[key] = Identity(
            name=name,
            body=session.body_bound,
            max_bytes=2 * session.body_bound.num_bytes,
            subject=OpenSession(key, session),
        )
        return key

    def close(self, key: str) -> None:
        """Close the session of a key; the key is unknown from now on."""
        if (identity := self._identities.pop(key, None)) is not None:
            assert isinstance(identity.subject, OpenSession)
            identity.subject.session.close()

    def identify(self, head: RequestHead) -> Identity | None:
        """Return the session whose key a request has; None without one."""
        for key in read_keys(head):
            if (identity := self._identities.get(key)) is not None:
                return identity
        return None


class Callers:
    """The callers of a gateway that serves harnesses too."""

    def __init__(self, keys: SessionKeys, *, token: str, offers: SessionOffers | None) -> None:
        """Know the keys and the token.

        Args:
            keys: The open sessions.
            token: Which a harness must have to take a session.
            offers: The episodes of harnesses that people start, if they drive the policy.
        """
        self._keys, self._token, self._offers = keys, token, offers
        self._harness = Identity(
            name="harness",
            max_calls=MAX_HARNESS_CALLS,
            max_connections=MAX_HARNESS_CALLS,
            subject=Harness(),
        )

    def identify(self, head: RequestHead) -> Identity | None:
        """Return who makes a request; see `http.identity.Identify`."""
        if (identity := self._keys.identify(head)) is not None or self._offers is None:
            return identity
        if self._token and is_same_secret(head.bearer, self._token):
            return self._harness
        for key in read_keys(head):
            if self._offers.is_finished(key):
                return Identity(name="finished session", subject=FinishedSession(key))
        return None


def read_keys(head: RequestHead) -> list[str]:
    """Return the keys in the headers of both vendors."""
    return [key for key in (head.bearer, head.headers.get("x-api-key", "")) if key]


NO_SAMPLING = CallSampling()


def require_session(request: Request, sampling: CallSampling = NO_SAMPLING) -> ChatSession:
    """Return the session that a request belongs to; a call of a model without a run opens one.

    Raises:
        HTTPException: 401, the request has the token of harnesses, or the key of a session that
            is over.
    """
    subject = read_identity(request.scope).subject
    if isinstance(subject, ModelClient):
        return subject.open_session(sampling)
    if not isinstance(subject, OpenSession):
        raise HTTPException(401, NO_KEY)
    return subject.session


def require_key(request: Request) -> str:
    """Return the key of the session, open or finished, that a request belongs to; raises as
    `require_session`.
    """
    subject = read_identity(request.scope).subject
    if not isinstance(subject, OpenSession | FinishedSession):
        raise HTTPException(401, "no key, or none of a session that a harness has")
    return subject.key
