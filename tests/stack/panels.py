"""Query a Prometheus for every dashboard panel, over the time of a run."""

from __future__ import annotations

from collections.abc import Iterator

from compose.grafana.generate import DASHBOARDS, Panel, plain_query
from tests.stack.prometheus import query_prometheus

STEP_SECONDS = 5


def panels_with_data(run: str, *, start: float, end: float) -> Iterator[tuple[Panel, bool]]:
    """Yield every panel, and whether Prometheus has data for it.

    Args:
        run: Label of the run. start: Start of the time range, seconds since the epoch. end: End of
            the time range, seconds since the epoch. Raises: StackError: Prometheus rejected a
            query.
    """
    for panels in DASHBOARDS.values():
        for panel in panels:
            yield (
                panel,
                bool(
                    query_prometheus(
                        "query_range",
                        query=plain_query(panel, run=run),
                        start=start,
                        end=end,
                        step=STEP_SECONDS,
                    )["result"]
                ),
            )
