"""A schema registry in this process with the parts of Confluent's interface that clients use:
subjects, ids, compatibility, logins."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

FIRST_ID = 7
Answer = tuple[int, Any]


@dataclass
class Registry:
    """Contents of the server, and the requests that it received."""

    login: str = ""
    schemas: list[str] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    broken: bool = False
    url: str = ""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        """Answer a request as Confluent's registry would."""
        self.calls[f"{method} {path}"] += 1
        if self.broken:
            return 500, {"error_code": 50001, "message": "store failure"}
        if method == "GET" and path == "/subjects":
            return 200, sorted(self.subjects)
        if found := re.fullmatch(r"/schemas/ids/(\d+)", path):
            return self._by_id(int(found[1]))
        if found := re.fullmatch(r"/subjects/(.+)/versions/latest", path):
            return self._latest(unquote(found[1]))
        if method == "POST" and (found := re.fullmatch(r"/subjects/(.+)/versions", path)):
            return self._register(unquote(found[1]), body["schema"])
        if method == "POST" and (found := re.fullmatch(r"/subjects/([^/]+)", path)):
            return self._look_up(unquote(found[1]), body["schema"])
        return 404, {"error_code": 404, "message": f"HTTP 404 Not Found: {method} {path}"}

    def _by_id(self, schema_id: int) -> Answer:
        schema_index = schema_id - FIRST_ID
        if not 0 <= schema_index < len(self.schemas):
            return 404, {"error_code": 40403, "message": f"Schema {schema_id} not found"}
        return 200, {"schema": self.schemas[schema_index]}

    def _register(self, subject: str, schema: str) -> Answer:
        try:
            parsed = avro.schema.parse(schema)
        except avro.errors.AvroException as error:
            return 422, {"error_code": 42201, "message": f"Invalid schema: {error}"}
        versions = self.subjects.setdefault(subject, [])
        if schema not in self.schemas:
            if not all(
                readable(parsed, avro.schema.parse(self.schemas[old - FIRST_ID]))
                for old in versions
            ):
                return 409, {
                    "error_code": 409,
                    "message": "Schema being registered is incompatible with an earlier schema",
                }
            self.schemas.append(schema)
        schema_id = FIRST_ID + self.schemas.index(schema)
        if schema_id not in versions:
            versions.append(schema_id)
        return 200, {"id": schema_id, "schema": schema}

    def _look_up(self, subject: str, schema: str) -> Answer:
        known = {
            self.schemas[schema_id - FIRST_ID]: schema_id
            for schema_id in self.subjects.get(subject, ())
        }
        if schema not in known:
            return 404, {"error_code": 40403, "message": "Schema not found"}
        version = self.subjects[subject].index(known[schema]) + 1
        return 200, {"id": known[schema], "subject": subject, "version": version, "schema": schema}

    def _latest(self, subject: str) -> Answer:
        versions = self.subjects.get(subject, [])
        if not versions:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        schema = self.schemas[versions[-1] - FIRST_ID]
        return 200, {
            "id": versions[-1],
            "subject": subject,
            "version": len(versions),
            "schema": schema,
        }


def readable(one: Any, other: Any) -> bool:
    """Tell whether two schemas read each other's records."""
    checker = ReaderWriterCompatibilityChecker()
    verdicts = {
        checker.get_compatibility(one, other).compatibility,
        checker.get_compatibility(other, one).compatibility,
    }
    return verdicts == {SchemaCompatibilityType.compatible}


@contextmanager
def serve_registry(login: str = "") -> Iterator[Registry]:
    """Yield a registry that listens on a free port of this machine; with a login it asks for it."""
    registry = Registry(login)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(*self._judge("GET"))

        def do_POST(self) -> None:
            self._answer(*self._judge("POST"))

        def _judge(self, method: str) -> Answer:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            wanted = f"Basic {base64.b64encode(registry.login.encode()).decode()}"
            if registry.login and self.headers.get("Authorization") != wanted:
                return 401, {"error_code": 401, "message": "Unauthorized"}
            return registry.answer(method, urlsplit(self.path).path, body)

        def _answer(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        registry.url = f"http://127.0.0.1:{server.server_port}"
        yield registry
        server.shutdown()
        thread.join(5)
