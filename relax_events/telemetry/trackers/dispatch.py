"""Feeds the trackers of a run file, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.plugins import TRACKERS, find_plugin, missing_import
from relax_events.telemetry.delivery import Feed
from relax_events.telemetry.trackers.progress import Memory
from relax_events.telemetry.trackers.protocol import Figures, Tracker


class TrackerWriter:
    """Opens a tracker with the first figures, and gives it those that it has not got."""

    def __init__(self, open_tracker: Callable[[Memory], Tracker], memory: Memory) -> None:
        self._open, self._memory = open_tracker, memory
        self._tracker: Tracker | None = None

    def write(self, figures: Figures) -> None:
        """Write figures, unless an earlier process did."""
        if self._tracker is None:
            self._tracker = self._open(self._memory)
        if self._tracker.remembers and self._memory.has(figures.series, figures.step):
            return
        self._tracker.write(figures)
        self._memory.advance(figures.series, figures.step)

    def close(self) -> None:
        """Close the tracker, if it was opened."""
        if self._tracker is not None:
            self._tracker.close()


def feed_tracker(
    name: str,
    open_tracker: Callable[[Memory], Tracker],
    *,
    memory: Memory,
    failed: Callable[[str], None],
) -> Feed[Figures]:
    """Begin to feed a tracker; see `Feed` and `TrackerWriter`."""
    writer = TrackerWriter(open_tracker, memory)
    return Feed(name, writer.write, close=writer.close, failed=failed)


def require_trackers(config: RunConfig) -> str:
    """Return the trackers of a run file, once all are there with the packages that they import;
    none is loaded, which takes seconds.

    Raises:
        ConfigError: There is none of such a name, or what it needs is not installed.
    """
    for name in config.telemetry.trackers:
        plugin = find_plugin(TRACKERS, name, what=f"telemetry.trackers: {name!r}")
        if (package := missing_import(plugin)) is not None:
            raise _needs(name, package)
    return ", ".join(config.telemetry.trackers) or "none"


def _needs(name: str, package: str | None) -> ConfigError:
    return ConfigError(
        f"telemetry.trackers: {name!r} needs {package}; pip install "
        "'relax-events[trackers]', or leave it out"
    )


def open_feeds(config: RunConfig, *, failed: Callable[[str], None]) -> list[Feed[Figures]]:
    """Begin to feed every tracker of `telemetry.trackers`.

    Raises:
        ConfigError: There is none of such a name, or what it needs is not installed.
    """
    return [_open_feed(name, config, failed=failed) for name in config.telemetry.trackers]


def _open_feed(name: str, config: RunConfig, *, failed: Callable[[str], None]) -> Feed[Figures]:
    plugin = find_plugin(TRACKERS, name, what=f"telemetry.trackers: {name!r}")
    try:
        kind: type[Tracker] = plugin.load()
    except ImportError as error:
        raise _needs(name, error.name) from None
    memory = Memory(config.run_directory / "trackers" / f"{name.rpartition(':')[2]}.json")
    return feed_tracker(name, lambda memory: kind(config, memory), memory=memory, failed=failed)
