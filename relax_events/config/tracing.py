"""The section `telemetry.traces`: tracing of prompt groups and train steps."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from relax_events.config.base import Section
from relax_events.config.external_values import Names


def _is_address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(
            f"must be an address such as http://127.0.0.1:4318/v1/traces, got {endpoint!r}; "
            "leave it empty to trace nothing"
        )
    if parts.username or parts.password:
        raise ValueError(
            "holds a user or password, which every log would show; give them as a header by "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    return endpoint


class TracesConfig(Section):
    """OpenTelemetry spans of prompt groups and train steps (extra `tracing`)."""

    endpoint: Annotated[str, AfterValidator(_is_address), Names.ADDRESS] = ""
    """OTLP/HTTP endpoint of a collector, such as `http://127.0.0.1:4318/v1/traces`; empty disables
    tracing. Headers and certificates are set by OpenTelemetry's variables
    `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_EXPORTER_OTLP_CERTIFICATE`."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the prompt groups that are traced. The prompter samples by trace id, and all roles
    follow it, so a trace is always complete. Train steps are always traced."""
