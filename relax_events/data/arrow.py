"""pyarrow, which is an extra: whoever needs it imports it from here."""

from __future__ import annotations

from relax_events.errors import EnvironmentProblem

try:
    import pyarrow as pa
    from pyarrow import parquet
except ImportError as error:
    raise EnvironmentProblem(f"Parquet and compressed files need the package pyarrow ({error}); install relax-events[parquet]") from None

__all__ = ["pa", "parquet"]
