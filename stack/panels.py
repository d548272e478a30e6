"""Asks a Prometheus every query of the dashboards, as Grafana would for the time of a run."""

from __future__ import annotations

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Iterator

from stack.dashboards import DASHBOARDS, Panel, plain_query

PROMETHEUS = f"http://127.0.0.1:{os.environ.get('PROMETHEUS_PORT', '9090')}"
STEP_SECONDS = 5
ANSWER_SECONDS = 30.0


def panels_with_data(run: str, *, start: float, end: float) -> Iterator[tuple[Panel, bool]]:
    """Give every panel, and whether Prometheus has data for it.

    Args:
        run: Label of the run.
        start: Seconds since the epoch; Grafana's choice of a time range.
        end: Likewise.
    Raises:
        HTTPError: Prometheus refused a query.
    """
    for panels in DASHBOARDS.values():
        for panel in panels:
            asked = {"query": plain_query(panel, run=run), "start": start, "end": end, "step": STEP_SECONDS}
            with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=ANSWER_SECONDS) as answer:
                yield panel, bool(json.load(answer)["data"]["result"])
