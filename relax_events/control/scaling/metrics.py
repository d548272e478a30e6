"""Figures of workers that come and go, for Prometheus: read off the state when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_events.control.scaling.bounds import Bounds
from relax_events.control.scaling.requests import ORDER, Kind
from relax_events.control.scaling.state import ScaleState


class ScaleMetrics(Collector):
    """Labels are bounded by the roles of the run file and by what a request can be; it may be asked from another thread."""

    def __init__(self, state: ScaleState, bounds: Bounds) -> None:
        self._state, self._bounds = state, bounds

    def collect(self) -> Iterator[Metric]:
        """Give every metric family."""
        open_now = Counter((request.role, request.kind, request.status) for request in list(self._state.requests.values()) if request.is_open)
        ended = Counter(self._state.ended)
        labels = ["role", "direction", "status"]
        pending = GaugeMetricFamily("relax_scale_requests_open", "Requests for which something is still to be done.", labels=labels)
        over = CounterMetricFamily("relax_scale_requests", "Requests for more or fewer workers that are over.", labels=labels)
        wanted = GaugeMetricFamily("relax_workers_wanted", "Workers that there shall be, those of the start among them.", labels=["role"])
        for pool in self._bounds.pools.values():
            for kind in Kind:
                for place, statuses in enumerate(ORDER[kind]):
                    is_last = place == len(ORDER[kind]) - 1
                    family, counts = (over, ended) if is_last else (pending, open_now)
                    for status in sorted(statuses):
                        family.add_metric([pool.role, kind, status], counts[pool.role, kind, status])
            wanted.add_metric([pool.role], pool.num_at_start + len(self._state.staying(pool.role)))
        yield from (pending, over, wanted)
