"""A Kubernetes API server on the loopback that knows the scale subresource of StatefulSets, and
refuses every call that the real one would refuse."""

from __future__ import annotations

import json
import re
import ssl
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from relax_events.kafka.security.certificates import make_authority, make_broker_certificate

TOKEN, NAMESPACE = "token-of-the-pod", "training"
PATH = re.compile(r"/apis/apps/v1/namespaces/([a-z0-9-]+)/statefulsets/([a-z0-9.-]+)/scale")
LIFETIME = timedelta(hours=1)


@dataclass
class StatefulSet:
    """Wanted and existing pods; `is_frozen` keeps the latter as they are."""

    wanted: int = 1
    existing: int = 1
    is_frozen: bool = False


@dataclass
class FakeApiServer:
    """Serves https with a certificate of its own authority, whose files lie in `account`."""

    folder: Path
    sets: dict[str, StatefulSet] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=set)
    """Names that the Role allows."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    is_silent: bool = False

    @property
    def account(self) -> Path:
        """The folder that Kubernetes mounts into the pod."""
        return self.folder / "account"

    def __enter__(self) -> FakeApiServer:
        authority = make_authority(lifetime=LIFETIME)
        pair = make_broker_certificate(authority, ["127.0.0.1"], lifetime=LIFETIME)
        self.account.mkdir(parents=True)
        (self.account / "ca.crt").write_bytes(authority.certificate)
        (self.account / "token").write_text(TOKEN)
        (self.account / "namespace").write_text(NAMESPACE)
        chain = self.folder / "server.pem"
        chain.write_bytes(pair.key + pair.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads = True
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        self._released = threading.Event()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any]]:
        """Return status and body of a call, as the real server does."""
        self.calls.append((method, path))
        if self.is_silent:
            self._released.wait(60)
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"kind": "Status", "message": "Unauthorized"}
        match = PATH.fullmatch(path)
        if match is None or match[1] != NAMESPACE or match[2] not in self.allowed:
            return 403, {"kind": "Status", "message": f"cannot {method.lower()} resource {path}"}
        name = match[2]
        if name not in self.sets:
            return 404, {"kind": "Status", "message": f'statefulsets.apps "{name}" not found'}
        found = self.sets[name]
        if method == "PATCH":
            if headers.get("content-type") != "application/merge-patch+json":
                return 415, {"kind": "Status", "message": "the body of the request was unknown"}
            change = json.loads(body)
            replicas = change.get("spec", {}).get("replicas")
            if change.keys() != {"spec"} or not isinstance(replicas, int) or replicas < 0:
                return 422, {"kind": "Status", "message": "Scale is invalid"}
            found.wanted = replicas
        elif not found.is_frozen:
            found.existing = found.wanted
        return 200, {
            "kind": "Scale",
            "spec": {"replicas": found.wanted} if found.wanted else {},
            "status": {"replicas": found.existing},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def handle_call(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, answer = server.answer(
                    self.command, self.path, headers, self.rfile.read(length)
                )
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PATCH = handle_call  # noqa: N815 as http.server calls them

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
                """Write nothing."""

        return Handler
