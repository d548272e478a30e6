"""Opens a worker's traces as configured in the run file; without traces nothing of OpenTelemetry is
imported.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

from relax_events.config import RunConfig, TracesConfig
from relax_events.errors import ConfigError
from relax_events.telemetry.component_metrics import SpanMetrics
from relax_events.telemetry.traces.api import Traces

PACKAGE = "opentelemetry.exporter.otlp.proto.http"


def require_tracing(traces: TracesConfig) -> str:
    """Describe where traces are sent, after checking that OpenTelemetry is installed.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not traces.endpoint:
        return "none: telemetry.traces.endpoint is empty"
    require_package("telemetry.traces.endpoint")
    return f"{traces.ratio:.0%} of the prompt groups, to {traces.endpoint}"


def require_package(what: str) -> None:
    """Require OpenTelemetry for a feature.

    Raises:
        ConfigError: OpenTelemetry is not installed; the text names the feature.
    """
    if not _is_installed():
        raise ConfigError(
            f"{what} needs OpenTelemetry; pip install 'relax-events[tracing]', or leave it out"
        )


def _is_installed() -> bool:
    with suppress(ModuleNotFoundError):  # raised for missing parent packages
        return find_spec(PACKAGE) is not None
    return False


def open_traces(config: RunConfig, *, role: str, worker_id: str, counts: SpanMetrics) -> Traces:
    """Open a worker's traces, which record nothing without a collector; raises as
    `require_tracing`.
    """
    traces = config.telemetry.traces
    require_tracing(traces)
    if not traces.endpoint:
        return Traces()
    from relax_events.telemetry.traces.export import SpanQueue, SpanSender
    from relax_events.telemetry.traces.recorded import RecordedTraces

    queue = SpanQueue(SpanSender(traces.endpoint, counts), counts)
    return RecordedTraces(
        queue,
        run_id=config.run.id,
        role=role,
        worker_id=worker_id,
        ratio=traces.ratio,
    )
