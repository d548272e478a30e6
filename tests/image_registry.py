"""An image registry in this process: manifests by tag and by digest, without login, with tokens, or
with a password.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
SIGNED = "application/vnd.docker.distribution.manifest.v1+prettyjws"
TOKEN = "of-one-call"


@dataclass
class ImageRegistry:
    """Contents and login of the server, and the requests that it received.

    Args:
        asks: `nothing`, `token` or `password`.
        login: User and password of the token server or the registry; none accepts anyone.
        realm: Where tokens are had; empty is the server itself.
        named_digest: What every answer names as its digest; empty is the true one.
        redirect: Where manifests lie, when elsewhere.
    """

    asks: str = "nothing"
    login: str = ""
    realm: str = ""
    named_digest: str = ""
    redirect: str = ""
    token_key: str = "token"
    host: str = ""
    manifests: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Path and authorization of each."""

    def put(self, repository: str, tag: str, kind: str, document: Any) -> str:
        """Hold a manifest and return its digest."""
        body = json.dumps(document, indent=3).encode()
        self.manifests[repository, tag, kind] = body
        return f"sha256:{sha256(body).hexdigest()}"

    def put_image(self, repository: str, tag: str, *, kind: str = INDEX) -> str:
        """Hold a list of two platforms, and for clients that don't know lists the manifest of one;
        return the list's digest."""
        digests = [
            self.put(repository, f"of-{arch}", MANIFEST, {"schemaVersion": 2, "of": arch})
            for arch in ("amd64", "arm64")
        ]
        self.put(repository, tag, MANIFEST, {"schemaVersion": 2, "of": "amd64"})
        return self.put(
            repository,
            tag,
            kind,
            {
                "schemaVersion": 2,
                "mediaType": kind,
                "manifests": [{"digest": one} for one in digests],
            },
        )

    def answer(
        self, path: str, query: dict[str, list[str]], accept: list[str], authorization: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Respond as the specification says: 401 and a challenge first, then the content type that
        the client prefers."""
        self.requests.append((path, authorization))
        basic = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if path == "/token":
            is_known = not self.login or authorization == basic
            is_asked_well = query == {
                "service": ["images"],
                "scope": [f"repository:{self._repository()}:pull"],
            }
            return (200, {}, self.token_answer) if is_known and is_asked_well else (401, {}, b"{}")
        wanted = {"nothing": authorization, "token": f"Bearer {TOKEN}", "password": basic}[
            self.asks
        ]
        if authorization != wanted:
            challenge = (
                "Bearer "
                f'realm="{self.realm or f"http://{self.host}/token"}",service="images",scope="repository:{self._repository()}:pull"'
            )
            return (
                401,
                {"WWW-Authenticate": challenge if self.asks == "token" else 'Basic realm="images"'},
                b"{}",
            )
        if self.redirect:
            return 307, {"Location": f"{self.redirect}{path}"}, b""
        repository, _, tag = path.removeprefix("/v2/").rpartition("/manifests/")
        kind = next((kind for kind in accept if (repository, tag, kind) in self.manifests), None)
        kind = kind or next(
            (held for of, at, held in self.manifests if (of, at) == (repository, tag)), None
        )
        if kind is None:
            return 404, {}, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}'
        body = self.manifests[repository, tag, kind]
        digest = self.named_digest or f"sha256:{sha256(body).hexdigest()}"
        return 200, {"Content-Type": kind, "Docker-Content-Digest": digest}, body

    @property
    def token_answer(self) -> bytes:
        """The response of the token server to a known user."""
        return json.dumps({self.token_key: TOKEN, "expires_in": 60}).encode()

    def _repository(self) -> str:
        return next(
            (
                path.removeprefix("/v2/").rpartition("/manifests/")[0]
                for path, _ in self.requests
                if path.startswith("/v2/")
            ),
            "",
        )


@contextmanager
def serve_images(**settings: str) -> Iterator[ImageRegistry]:
    """Yield a registry that listens on a free port of this machine."""
    registry = ImageRegistry(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            at = urlsplit(self.path)
            accept = [kind.strip() for kind in self.headers.get("Accept", "").split(",")]
            status, headers, body = registry.answer(
                at.path, parse_qs(at.query), accept, self.headers.get("Authorization", "")
            )
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.host = f"127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield registry
        finally:
            server.shutdown()
