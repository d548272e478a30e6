"""Sends metrics to the trackers of a run file, each in its own thread."""

from __future__ import annotations

from collections.abc import Callable

from relax_events.config import RunConfig, TelemetryConfig
from relax_events.errors import ConfigError
from relax_events.plugins import TRACKERS, find_missing_import, find_plugin
from relax_events.telemetry.delivery import DeliveryQueue
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics, Tracker


class TrackerWriter:
    """Opens a tracker at the first metrics, and writes metrics that it has not received."""

    def __init__(
        self, open_tracker: Callable[[DeliveryProgress], Tracker], memory: DeliveryProgress
    ) -> None:
        self._open, self._memory = open_tracker, memory
        self._tracker: Tracker | None = None

    def write(self, step_metrics: StepMetrics) -> None:
        """Write metrics, unless an earlier process did."""
        if self._tracker is None:
            self._tracker = self._open(self._memory)
        if self._tracker.remembers and self._memory.is_delivered(
            step_metrics.series, step_metrics.step
        ):
            return
        self._tracker.write(step_metrics)
        self._memory.mark_delivered(step_metrics.series, step_metrics.step)

    def close(self) -> None:
        """Close the tracker if it was opened."""
        if self._tracker is not None:
            self._tracker.close()


def open_tracker_queue(
    name: str,
    open_tracker: Callable[[DeliveryProgress], Tracker],
    *,
    memory: DeliveryProgress,
    failed: Callable[[str], None],
) -> DeliveryQueue[StepMetrics]:
    """Open the delivery queue of a tracker; see `DeliveryQueue` and `TrackerWriter`."""
    writer = TrackerWriter(open_tracker, memory)
    return DeliveryQueue(name, writer.write, close=writer.close, failed=failed)


def require_trackers(telemetry: TelemetryConfig) -> str:
    """Return the trackers of a run file after checking that they and their packages are installed.
    Does not load them, which takes seconds.

    Raises:
        ConfigError: There is no tracker of this name, or a package that it needs is missing.
    """
    for name in telemetry.trackers:
        plugin = find_plugin(TRACKERS, name, what=f"telemetry.trackers: {name!r}")
        if (package := find_missing_import(plugin)) is not None:
            raise _build_missing_package_error(name, package)
    return ", ".join(telemetry.trackers) or "none"


def _build_missing_package_error(name: str, package: str | None) -> ConfigError:
    return ConfigError(
        f"telemetry.trackers: {name!r} needs {package}; pip install "
        "'relax-events[trackers]', or leave it out"
    )


def open_tracker_queues(
    config: RunConfig, *, failed: Callable[[str], None]
) -> list[DeliveryQueue[StepMetrics]]:
    """Open the delivery queues of all trackers in `telemetry.trackers`.

    Raises:
        ConfigError: There is no tracker of this name, or a package that it needs is missing.
    """
    return [
        _open_configured_tracker(name, config, failed=failed) for name in config.telemetry.trackers
    ]


def _open_configured_tracker(
    name: str, config: RunConfig, *, failed: Callable[[str], None]
) -> DeliveryQueue[StepMetrics]:
    plugin = find_plugin(TRACKERS, name, what=f"telemetry.trackers: {name!r}")
    try:
        kind: type[Tracker] = plugin.load()
    except ImportError as error:
        raise _build_missing_package_error(name, error.name) from None
    memory = DeliveryProgress(config.run_directory / "trackers" / f"{name.rpartition(':')[2]}.json")
    return open_tracker_queue(
        name, lambda memory: kind(config, memory), memory=memory, failed=failed
    )
