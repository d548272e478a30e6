"""A hub of models and datasets in this process, with the part of Hugging Face's interface by which
its library fetches files: revisions, trees, and files in ranges."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/(.+)")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """Commits of a repository, each with its files, and the branches that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str = ""
    is_gated: bool = False

    def commit(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Add a commit, and move a branch to it; return its id."""
        digest = sha256(repr(sorted(files.items())).encode()).hexdigest()[:40]
        self.commits[digest], self.branches[branch] = files, digest
        return digest


@dataclass
class Hub:
    """The repositories of the server by kind and name, and the requests that it received."""

    repos: dict[str, Repo] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    url: str = ""
    cut_after: int = -1
    """Bytes of a file after which connections break, once; negative: none does."""

    def add(self, name: str, *, kind: str = "models") -> Repo:
        """Create a repository."""
        return self.repos.setdefault(f"{kind}/{name}", Repo())

    def add_folder(self, name: str, folder: Path) -> str:
        """Create a model's repository from a folder; return its commit."""
        return self.add(name).commit(
            {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.calls.append(f"{self.command} {path}")
        if match := API.fullmatch(path):
            self._describe(match[1], match[2], match[3], match[4])
        elif match := FILE.fullmatch(path):
            kind = "datasets" if match[1] else "models"
            self._give_file(kind, match[2], match[3], match[4], has_body=has_body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _find(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return a commit and its files; None once the request was refused."""
        repo = self.hub.repos.get(f"{kind}/{name}")
        is_trusted = repo is not None and (
            not repo.token or self.headers.get("Authorization") == f"Bearer {repo.token}"
        )
        if repo is None or not (is_trusted or repo.is_gated):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif not is_trusted:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif (commit := repo.branches.get(revision, revision)) not in repo.commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return commit, repo.commits[commit]
        return None

    def _describe(self, kind: str, name: str, what: str, revision: str) -> None:
        if (content := self._find(kind, name, revision)) is None:
            return
        commit, files = content
        answer: Any = {
            "id": name,
            "sha": commit,
            "siblings": [{"rfilename": path} for path in files],
        }
        if what == "tree":
            answer = [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _give_file(self, kind: str, name: str, revision: str, path: str, *, has_body: bool) -> None:
        if (content := self._find(kind, name, revision)) is None:
            return
        commit, files = content
        headers = {"X-Repo-Commit": commit}
        if (data := files.get(path)) is None:
            self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or "00")[1])
        headers |= {"ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if first:
            self.hub.calls.append(f"RANGE {path} from {first}")
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._send(206 if first else 200, data[first:], headers, has_body=has_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, has_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not has_body or self.command == "HEAD":
            return
        if 0 <= self.hub.cut_after < len(body):
            body, self.hub.cut_after, self.close_connection = body[: self.hub.cut_after], -1, True
        self.wfile.write(body)


def _etag(data: bytes) -> str:
    return sha256(data).hexdigest()[:40]


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}), bind_and_activate=True
    )
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
