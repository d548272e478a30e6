"""A web service on 127.0.0.1 with wrong answers, as a judge or a reward service could send them to
a reward.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

MARK = "reply:"
"""The begin of a completion that asks for a reply by name."""
LARGE = 64 * 1024**2
CHUNK = b" " * 65_536


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; without `pieces` its body is sent as long as the client takes it."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    is_endless: bool = False
    is_slow: bool = False


def _chat(text: str, **fields: Any) -> Reply:
    message = {"role": "assistant", "content": text} | fields
    return Reply(json.dumps({"choices": [{"message": message}]}).encode())


def list_replies(port: int) -> dict[str, Reply]:
    """Return the replies by the effect that they try to have; each must fail its sample.

    Args:
        port: On 127.0.0.1, to which a redirect leads.
    """
    bomb = zlib.compress(bytes(LARGE), wbits=31)
    inner = f"http://127.0.0.1:{port}/latest/meta-data"
    return {
        "gzip bomb": Reply(bomb, headers=(("Content-Encoding", "gzip"),)),
        "gzip bomb without a word": Reply(bomb),
        "redirect": Reply(status=302, headers=(("Location", inner),)),
        "redirect that keeps the body": Reply(status=307, headers=(("Location", inner),)),
        "redirect to a file": Reply(status=301, headers=(("Location", "file:///etc/passwd"),)),
        "endless body": Reply(is_endless=True),
        "slow body": Reply(is_slow=True),
        "headers without end": Reply(headers=tuple((f"X-{n}", "x" * 8000) for n in range(200))),
        "nothing": Reply(),
        "no JSON": Reply(b"<html>"),
        "half of JSON": Reply(b'{"reward": 1'),
        "no UTF-8": Reply(b'"\xff\xfe"'),
        "lists in lists": Reply(b"[" * 100_000),
        "infinity": Reply(b"1e999"),
        "not a number": Reply(b"NaN"),
        "a number of a million digits": Reply(b"9" * 1_000_000),
        "a text": Reply(b'"1"'),
        "true": Reply(b"true"),
        "nothing of JSON": Reply(b"null"),
        "lists": Reply(b"[[[[1]]]]"),
        "other keys": Reply(b'{"reward": {"reward": 1}}'),
        "no choice": Reply(b'{"choices": []}'),
        "choices of another kind": Reply(b'{"choices": {"message": 1}}'),
        "content of a number": Reply(b'{"choices": [{"message": {"content": 7}}]}'),
        "score beyond the range": _chat("Score: 11"),
        "negative score": _chat("Score: -1"),
        "score that is no number": _chat("Score: nan"),
        "score of many digits": _chat("Score: " + "9" * 100_000),
        "verdict in another word": _chat("Verdict: 1; __import__('os')"),
    }


def list_policy_replies(texts: Iterable[str]) -> dict[str, Reply]:
    """Return replies to a policy's request, as texts and as arguments of tools.

    Args:
        texts: Of the replies.
    """
    message, usage = b'{"role": "assistant", "content": "a"}', b'{"prompt_tokens": 1e999}'
    counted = b'{"choices": [{"message": %b}], "usage": %b}' % (message, usage)
    replies = {"infinitely many tokens": Reply(counted)}
    for number, text in enumerate(texts):
        replies[f"text {number}"] = _chat(text)
        function = {"name": text, "arguments": {text: text}}
        replies[f"call {number}"] = _chat("", tool_calls=[{"id": "a", "function": function}])
    return replies


@contextmanager
def hostile_service(port: int, more: Mapping[str, Reply] = MappingProxyType({})) -> Iterator[str]:
    """Serve the replies, and `more` of them, and give the address."""
    replies = {**list_replies(port), **more}
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            named = (name for name in replies if f"{MARK}{name};" in text)
            with suppress(OSError):  # the client has left
                _send(self, replies.get(next(named, ""), Reply(b"0.5")), ended)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _send(handler: BaseHTTPRequestHandler, reply: Reply, ended: threading.Event) -> None:
    handler.send_response(reply.status)
    for name, value in reply.headers:
        handler.send_header(name, value)
    if not (reply.is_endless or reply.is_slow):
        handler.send_header("Content-Length", str(len(reply.body)))
    handler.end_headers()
    handler.wfile.write(reply.body)
    for _ in range(LARGE // len(CHUNK) if reply.is_endless else 0):
        handler.wfile.write(CHUNK)
    while reply.is_slow and not ended.wait(0.2):
        handler.wfile.write(b" ")
