"""OpenTelemetry traces of prompt groups from prompt to gradient. Record headers carry the context
(ADR 18).

Roles call `Traces`, which does nothing; `open_traces` returns a recording one if the run file names
a collector.
"""

from relax_events.telemetry.traces.api import NO_HEADERS, NOT_TRACED, TracedWork, Traces, Value
from relax_events.telemetry.traces.factory import open_traces, require_tracing

__all__ = [
    "NOT_TRACED",
    "NO_HEADERS",
    "TracedWork",
    "Traces",
    "Value",
    "open_traces",
    "require_tracing",
]
