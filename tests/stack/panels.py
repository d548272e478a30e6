"""Asks a Prometheus every query of the dashboards, as Grafana would for the time of a run."""

from __future__ import annotations

from collections.abc import Iterator

from compose.grafana.generate import DASHBOARDS, Panel, plain_query
from tests.stack.prometheus import ask

STEP_SECONDS = 5


def panels_with_data(run: str, *, start: float, end: float) -> Iterator[tuple[Panel, bool]]:
    """Give every panel, and whether Prometheus has data for it.

    Args:
        run: Label of the run.
        start: Seconds since the epoch; Grafana's choice of a time range.
        end: Likewise.
    Raises:
        StackError: Prometheus refused a query.
    """
    for panels in DASHBOARDS.values():
        for panel in panels:
            yield (
                panel,
                bool(
                    ask(
                        "query_range",
                        query=plain_query(panel, run=run),
                        start=start,
                        end=end,
                        step=STEP_SECONDS,
                    )["result"]
                ),
            )
