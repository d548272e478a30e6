"""Traces of prompt groups from prompt to gradient, by OpenTelemetry. Their context travels in the
headers of records (ADR 18).

Roles speak to `Traces`, which does nothing; `open_traces` gives them one that records where the run
file names a collector.
"""

from relax_events.telemetry.traces.api import NO_HEADERS, NOT_TRACED, Traces, Value, TracedWork
from relax_events.telemetry.traces.factory import open_traces, require_tracing

__all__ = ["NOT_TRACED", "NO_HEADERS", "Traces", "Value", "TracedWork", "open_traces", "require_tracing"]
