"""Ids of traces: those of prompt groups and train steps follow from their names, so that whoever does a thing again does it in the same trace."""

from __future__ import annotations

import hashlib
import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, TraceFlags


def root_of(run_id: str, name: str) -> SpanContext:
    """Derive the first span of the trace of a prompt group or a step."""
    digest = hashlib.blake2b(f"{run_id}/{name}".encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
    return SpanContext(trace_id or 1, span_id or 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def is_chosen(trace_id: int, ratio: float) -> bool:
    """Tell whether a trace is among the share that is kept, by the eight bytes that OpenTelemetry's `TraceIdRatioBased` goes by."""
    return (trace_id & (2**64 - 1)) < round(ratio * 2**64)


class DerivedIds(IdGenerator):
    """Gives a span the ids of `root` while one is set, else random ones. It leaves the generator of `random` alone, which others seed."""

    def __init__(self) -> None:
        self.root: SpanContext | None = None

    def generate_trace_id(self) -> int:
        """See `IdGenerator`."""
        return self.root.trace_id if self.root else secrets.randbits(128) or 1

    def generate_span_id(self) -> int:
        """See `IdGenerator`."""
        return self.root.span_id if self.root else secrets.randbits(64) or 1
