"""Sends spans to a collector from a separate thread. An unavailable collector loses spans, which
are counted, and never delays the worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = structlog.get_logger()
QUEUED_SPANS = 8192
BATCH_SPANS = 512
DELAY_SECONDS = 1.0
REQUEST_SECONDS = 3.0
"""The time limit of a request with its OTLP retries; then its spans are lost."""
CLOSE_SECONDS = 3.0


class SpanCounts(Protocol):
    """Counters of spans."""

    def sent(self, count: int) -> None:
        """Count spans that the collector accepted."""

    def lost(self, count: int, reason: str) -> None:
        """Count lost spans: the `collector` did not accept them, or the `queue` was full."""


class SpanSender(SpanExporter):
    """Exports spans by OTLP over HTTP, and counts delivered and lost ones."""

    def __init__(self, endpoint: str, counts: SpanCounts) -> None:
        logging.getLogger("opentelemetry").setLevel(
            logging.CRITICAL + 1
        )  # outages are logged here, once
        self._endpoint, self._counts = endpoint, counts
        self._exporter = OTLPSpanExporter(endpoint, timeout=REQUEST_SECONDS)
        self._is_away = False
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self.num_taken += len(spans)
        result = self._exporter.export(spans)
        is_sent = result is SpanExportResult.SUCCESS
        if is_sent:
            self._counts.sent(len(spans))
        else:
            self._counts.lost(len(spans), "collector")
        if is_sent is self._is_away:
            self._is_away = not is_sent
            log.warning(
                "collector.recovered" if is_sent else "collector.lost",
                endpoint=self._endpoint,
                num_spans=len(spans),
            )
        return result

    def shutdown(self) -> None:
        """Cancel pending requests."""
        self._exporter.shutdown()


class SpanQueue(BatchSpanProcessor):
    """The SDK's bounded queue, which drops its oldest span when full, with a count of dropped
    spans. Used by one thread.
    """

    def __init__(self, sender: SpanSender, counts: SpanCounts) -> None:
        super().__init__(
            sender,
            max_queue_size=QUEUED_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=DELAY_SECONDS * 1000,
        )
        self._sender, self._counts = sender, counts
        self._num_given = self._num_dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span."""
        super().on_end(span)
        self._num_given += 1
        if self._num_given - self._num_dropped - self._sender.num_taken > QUEUED_SPANS:
            self._num_dropped += 1
            self._counts.lost(1, "queue")

    def close(self) -> None:
        """Send pending spans within a few seconds; the SDK would wait for 30 s."""
        closing = threading.Thread(target=super().shutdown, name="spans-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if left := self._num_given - self._num_dropped - self._sender.num_taken:
            log.warning("spans.dropped", num_spans=left)
