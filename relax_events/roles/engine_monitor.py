"""Measures an engine's activity, for the worker's metrics and the progress display."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from relax_events.config import EngineConfig
from relax_events.engines.protocol import Engine, EngineUsage
from relax_events.runtime.worker import Worker

Activity = Literal["generating", "loading"]


class EngineMonitor:
    """Enter `activity` around the engine's work; it idles the rest of the time.

    Metrics since the last report:
        tokens_per_second: Sampled tokens.
        generating_ratio, loading_ratio: Shares of the time.
        cached_ratio: Of the prompt tokens, the ratio that a prefix cache saved; left out when
            there were none.
        recomputed_tokens: Earlier sampled tokens whose KV entries were computed again.
        decoding_samples, waiting_samples, capacity_samples: At the time of the report.
    """

    def __init__(
        self, worker: Worker, engine: Engine, *, config: EngineConfig | None = None
    ) -> None:
        """Start to count.

        Args:
            worker: The worker that reports the metrics.
            engine: The measured engine.
            config: The engine's settings; by default the policy engine's.
        """
        self._engine, self._metrics = engine, worker.metrics.engine
        self._capacity = (config or worker.config.engine).max_running_samples
        self._counted = self._reported = engine.usage
        self._seconds: defaultdict[str, float] = defaultdict(float)
        worker.heartbeat.add_metrics_source(self._collect_metrics)
        worker.lifecycle.on_heartbeat(self._update_metrics)

    @contextmanager
    def activity(self, activity: Activity) -> Iterator[None]:
        """Count the time inside the block as this activity of the engine."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self._seconds[activity] += seconds
            self._metrics.count_seconds(activity, seconds)

    def _update_metrics(self) -> None:
        usage = self._engine.usage
        self._metrics.set_samples(
            decoding=usage.num_decoding, waiting=usage.num_waiting, capacity=self._capacity
        )
        self._metrics.count_tokens(count_tokens_between(self._counted, usage))
        self._counted = usage

    def _collect_metrics(self, elapsed: float) -> Mapping[str, float]:
        usage, seconds = self._engine.usage, dict(self._seconds)
        tokens = count_tokens_between(self._reported, usage)
        self._reported = usage
        self._seconds.clear()
        input_tokens = tokens["prefilled"] + tokens["cached"]
        return {
            "tokens_per_second": tokens["generated"] / elapsed,
            **{
                f"{activity}_ratio": min(1.0, seconds.get(activity, 0.0) / elapsed)
                for activity in ("generating", "loading")
            },
            **({"cached_ratio": tokens["cached"] / input_tokens} if input_tokens else {}),
            "recomputed_tokens": float(tokens["recomputed"]),
            "decoding_samples": float(usage.num_decoding),
            "waiting_samples": float(usage.num_waiting),
            "capacity_samples": float(self._capacity),
        }


def count_tokens_between(before: EngineUsage, now: EngineUsage) -> dict[str, int]:
    """Return the tokens between two readings of the usage, by what the engine did with them."""
    return {
        "generated": now.num_generated - before.num_generated,
        "prefilled": now.num_prefilled - before.num_prefilled,
        "cached": now.num_cached - before.num_cached,
        "recomputed": now.num_recomputed - before.num_recomputed,
    }
