"""A trace collector in this process: receives OTLP over HTTP, decodes its protobuf, keeps the
spans.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

SpanKey = tuple[bytes, bytes]
"""Trace and span."""


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span."""

    service: str
    name: str
    kind: str
    key: SpanKey
    parent: bytes
    facts: dict[str, Any]
    links: tuple[SpanKey, ...]
    began_ns: int
    ended_ns: int
    error: str


@dataclass
class Collector:
    """The received spans."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        """Return the spans of one name."""
        return [span for span in list(self.spans) if span.name == name]

    def take(self, body: bytes) -> None:
        """Take a request in."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _facts(resource.resource.attributes)["service.name"]
            self.spans += [
                _received(service, span) for scope in resource.scope_spans for span in scope.spans
            ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector on a free port, and close it afterwards."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        try:
            yield collector
        finally:
            server.shutdown()


def _received(service: str, span: Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        key=(span.trace_id, span.span_id),
        parent=span.parent_span_id,
        facts=_facts(span.attributes),
        links=tuple((link.trace_id, link.span_id) for link in span.links),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(item) for item in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )
