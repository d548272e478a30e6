"""Requests that our HTTP servers must refuse: malformed heads, smuggled bodies, foreign keys and
pages, and bodies that cost more than their caller may.

    attack = head + pieces of a body --> sent until the server closes --> status, bytes it took
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

CHUNK = b"x" * 65_536
LARGE = 64 * 1024**2
"""Bytes of a body without a key: all of them must stay unread."""
CLOSED = 0
"""The status of a connection that is closed without an answer."""
UNREADABLE = frozenset({400, 501, CLOSED})
"""A server's statuses for a head that is no HTTP; some servers refuse first for want of a key."""


@dataclass(frozen=True, slots=True)
class Target:
    """The call of a server that is attacked.

    Attributes:
        host: The server's own name and port.
        path: A route that reads a JSON body, and needs a key.
        key: The header line with a right key.
        num_bytes: The bound of this key's bodies.
    """

    host: str
    path: str
    key: str
    num_bytes: int

    def head(self, *lines: str, host: str = "", key: str | None = None, path: str = "") -> bytes:
        """Return a head of POST with further lines; an empty key leaves it out."""
        key = self.key if key is None else key
        headers = (f"Host: {host or self.host}", "Content-Type: application/json", key, *lines)
        text = "\r\n".join((f"POST {path or self.path} HTTP/1.1", *filter(None, headers)))
        return f"{text}\r\n\r\n".encode("latin-1")


@dataclass(frozen=True, slots=True)
class HttpAttack:
    """A request and its refusal.

    Attributes:
        name: The effect that it tries to have.
        head: The first bytes.
        body: Yields the pieces that follow, as long as the server takes them.
        statuses: The right answers; `CLOSED` is the end of the connection without one.
        max_bytes: So much of the body the server may take, together with what the kernel holds.
    """

    name: str
    head: bytes
    statuses: frozenset[int]
    body: Callable[[], Iterator[bytes]] = lambda: iter(())
    max_bytes: int = 8 * 1024**2


def http_attacks(target: Target) -> list[HttpAttack]:
    """Return all attacks on a server; none has an effect there."""
    return [*_without_a_key(target), *_of_other_pages(target), *_malformed(target), *_dear(target)]


def _attack(name: str, head: bytes, *statuses: int, body: bytes = b"") -> HttpAttack:
    return HttpAttack(name, head, frozenset(statuses), lambda: iter((body,) if body else ()))


def _without_a_key(target: Target) -> list[HttpAttack]:
    """Requests of callers without a key: none of their bytes is read."""
    length = f"Content-Length: {LARGE}"
    denied, unauthorized = frozenset({401}), {401}
    name, _, key = target.key.partition(": ")
    large = [
        HttpAttack("64 MB without a key", target.head(length, key=""), denied, _large_body),
        HttpAttack(
            "chunks without a key",
            target.head("Transfer-Encoding: chunked", key=""),
            denied,
            _chunked_body,
        ),
        HttpAttack(
            "64 MB with another key",
            target.head(length, key=f"{name}: Bearer x"),
            denied,
            _large_body,
        ),
        HttpAttack(
            "64 MB and a question whether to send them",
            target.head(length, "Expect: 100-continue", key=""),
            denied,
        ),
    ]
    wrong = {
        "no key": "",
        "an empty key": f"{name}: ",
        "a key cut short": target.key[:-1],
        "a longer key": f"{target.key}x",
        "a key as a password": "Authorization: Basic cmVsYXg6cmVsYXg=",
        "a key that is no text": f"{name}: Bearer \xe4\xff",
        "a key of a page that is over": "Cookie: relax-page=relax-page; token=x",
        "a key as another header": f"X-Token: {key}",
    }
    heads = {what: target.head("Content-Length: 2", key=line) for what, line in wrong.items()}
    in_query = target.head(
        "Content-Length: 2", key="", path=f"{target.path}?token={key.split()[-1]}"
    )
    small = [_attack(what, head, *unauthorized, body=b"{}") for what, head in heads.items()]
    return [*large, *small, _attack("a key in the address", in_query, 401, body=b"{}")]


def _of_other_pages(target: Target) -> list[HttpAttack]:
    """Requests that a page of another origin makes a browser send."""
    evil = "evil.example"
    length = "Content-Length: 2"
    origins = ("http://evil.example", "null", f"http://{target.host}.evil.example", "file://")
    sites = ("cross-site", "same-site")
    return [
        _attack("another host", target.head(length, host=evil), 421, body=b"{}"),
        _attack("a host below another", target.head(length, host=f"127.0.0.1.{evil}"), 421),
        *(
            _attack(f"origin {origin}", target.head(length, f"Origin: {origin}"), 403, body=b"{}")
            for origin in origins
        ),
        *(
            _attack(f"a {site} page", target.head(length, f"Sec-Fetch-Site: {site}"), 403)
            for site in sites
        ),
    ]


def _malformed(target: Target) -> list[HttpAttack]:
    """Heads that two programs would understand differently."""
    lines = {
        "two hosts": ("Host: evil.example", "Content-Length: 2"),
        "two lengths": ("Content-Length: 2", "Content-Length: 3"),
        "a list of lengths": ("Content-Length: 2, 3",),
        "a signed length": ("Content-Length: +2",),
        "a length of thirty digits": (f"Content-Length: {'9' * 30}",),
        "a length in hexadecimal": ("Content-Length: 0x2",),
        "another coding": ("Transfer-Encoding: xchunked",),
        "two codings": ("Transfer-Encoding: gzip, chunked",),
        "a space before the colon": ("Content-Length : 2",),
        "a line without a colon": ("Content-Length 2",),
        "an empty name": (": 2",),
        "a name with a zero byte": ("X\0: 2",),
        "a value with a zero byte": ("X: \0",),
    }
    attacks = [
        HttpAttack(name, target.head(*more), UNREADABLE | {413}, lambda: iter((b"{}",)))
        for name, more in lines.items()
    ]
    smuggled = b"0\r\n\r\nGET /api/runs HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    both = target.head("Content-Length: 4", "Transfer-Encoding: chunked", key="")
    return [
        *attacks,
        _attack("a length and chunks", both, 400, 401, CLOSED, body=smuggled),
        _attack("a chunk size that is none", _chunk_head(target), 400, CLOSED, body=b"zz\r\n"),
        _attack("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, CLOSED),
        _attack("a line of 128 KB", b"GET /" + b"a" * 131_072 + b" HTTP/1.1\r\n\r\n", 400, CLOSED),
        _attack("a header of 128 KB", target.head(f"X: {'a' * 131_072}"), 400, 413, CLOSED),
    ]


def _dear(target: Target) -> list[HttpAttack]:
    """Bodies of a caller with the key, which cost more than a call may."""
    too_long = target.num_bytes + 1
    deep = b"[" * 5000 + b"]" * 5000
    values = b'{"messages": [' + b"[]," * ((target.num_bytes - 32) // 3) + b"[]]}"
    return [
        _attack("a body beyond the bound", target.head(f"Content-Length: {too_long}"), 413),
        HttpAttack(
            "chunks beyond the bound",
            _chunk_head(target),
            frozenset({413}),
            _chunked_body,
            max_bytes=target.num_bytes + 8 * 1024**2,
        ),
        _attack(
            "a body that is compressed",
            target.head("Content-Length: 2", "Content-Encoding: gzip"),
            415,
            body=b"\x1f\x8b",
        ),
        HttpAttack(
            "a body of empty lists",
            target.head(f"Content-Length: {len(values)}"),
            frozenset({400, 413}),
            lambda: iter((values,)),
            max_bytes=len(values),
        ),
        _attack(
            "lists in lists",
            target.head(f"Content-Length: {len(deep)}"),
            *(400, 422),
            body=deep,
        ),
        _attack("half of JSON", target.head("Content-Length: 6"), 400, 422, body=b'{"a": '),
        _attack("no UTF-8", target.head("Content-Length: 4"), 400, 422, body=b"\xff\xfe\x00\x00"),
    ]


def slow_attacks(target: Target) -> list[HttpAttack]:
    """Return requests that the server must end by a deadline."""
    return [
        _attack("a body that stops", target.head("Content-Length: 10"), 408, body=b"half"),
        _attack("a head that stops", target.head()[:-2], CLOSED),
        _attack("nothing at all", b"", CLOSED),
    ]


def _chunk_head(target: Target) -> bytes:
    return target.head("Transfer-Encoding: chunked")


def _large_body() -> Iterator[bytes]:
    for _ in range(LARGE // len(CHUNK)):
        yield CHUNK


def _chunked_body() -> Iterator[bytes]:
    for piece in _large_body():
        yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
