"""The runs of a cluster, each with its reader once a page shows it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from relax_events.api.errors import ConfigError
from relax_events.api.log import Cluster, Connection
from relax_events.api.runs import RunConfig, RunLister, read_run
from relax_events.packages.dashboard.answers import Answers, Bell, Remembered
from relax_events.packages.dashboard.details import list_dead_letters, open_log, read_lag
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.runtime.run_description import SHAPE_KEYS

MAX_OPEN = 4
LIST_SECONDS = 3.0
DEAD_LETTER_SECONDS = 10.0
LAG_SECONDS = 5.0


class OpenRun:
    """A run that pages show: its reader, the answers from its state, its lag, its dead letters."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.reader, self.bell = RunReader(config, gives_way=True), Bell()
        self.reader.on_news = self.bell.ring
        self.reader.start()
        self.answers = Answers(lambda: self.reader.status.revision)
        self.lag = Remembered(lambda: read_lag(config), seconds=LAG_SECONDS)
        self.dead_letters = Remembered(
            lambda: _read_dead_letters(config), seconds=DEAD_LETTER_SECONDS
        )
        self.used_at = time.monotonic()

    def keep_open(self) -> None:
        """Note that a page shows the run: its reader reads on."""
        self.used_at = time.monotonic()
        self.reader.keep_reading()


class RunRegistry:
    """Opens runs when they are asked for; the least recently used of too many are closed."""

    def __init__(self, cluster: Cluster, *, first: RunConfig | None = None) -> None:
        """Connect.

        Args:
            cluster: The broker whose runs are shown.
            first: The run that the page opens with, from its run file; None for the newest one.
        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        self._cluster, self._first = cluster, first
        self._connection: Connection = cluster.connection(name="dashboard")
        self._lister = RunLister(self._connection)
        self._open: dict[str, OpenRun] = {}
        self._lock = threading.Lock()
        self._listed = Remembered(self._list_runs, seconds=LIST_SECONDS)

    @property
    def first_run(self) -> str:
        """The run that the page opens with; empty for the newest."""
        return self._first.run.id if self._first else ""

    def close(self) -> None:
        """Stop all readers."""
        for run in self._open.values():
            run.reader.close()

    def list_runs(self) -> list[dict[str, Any]]:
        """Return the runs of the cluster, the newest first."""
        return self._listed.get()

    def _list_runs(self) -> list[dict[str, Any]]:
        rows = [run.as_row() for run in self._lister.read().values()]
        rows.sort(key=lambda row: -row["started_at"])
        return [row | {"started_at": row["started_at"] // 1000} for row in rows]

    def open(self, run_id: str) -> OpenRun:
        """Return an open run.

        Raises:
            ConfigError: There is no such run, or its log does not describe it.
        """
        with self._lock:
            run = self._open.get(run_id)
            if run is None:
                run = self._open[run_id] = OpenRun(self._config(run_id))
            run.keep_open()
            while len(self._open) > MAX_OPEN:
                oldest = min(self._open, key=lambda name: self._open[name].used_at)
                self._open.pop(oldest).reader.close()
            return run

    def _config(self, run_id: str) -> RunConfig:
        summary = read_run(self._connection, run_id)
        run_file = self._first if self._first and self._first.run.id == run_id else None
        settings = summary.config or run_file
        if settings is None:
            raise ConfigError(
                f"the log of run {run_id} does not describe it: it is half deleted; give its run "
                "file: relax dashboard RUN_FILE"
            )
        return settings.model_copy(update={"broker": self._broker(settings)})

    def _broker(self, settings: RunConfig) -> Any:
        """Return the address of this cluster with the run's own shape of topics."""
        here = self._cluster.broker_with_address
        shape = settings.broker
        return here.model_copy(update={name: getattr(shape, name) for name in SHAPE_KEYS})


def find_runbook(alert: str) -> str:
    """Return what the page of alerts says about an alert.

    Raises:
        ConfigError: The page has no such alert.
    """
    here = Path(__file__).parent
    packaged, checkout = here / "alerts.md", here.parents[2] / "docs" / "how-to" / "alerts.md"
    text = (packaged if packaged.is_file() else checkout).read_text("utf-8")
    for section in text.split("\n## ")[1:]:
        if section.partition("\n")[0] == alert:
            return f"# {section.rstrip()}\n"
    raise ConfigError(f"there is no runbook {alert[:64]!r}; see docs/how-to/alerts.md")


def _read_dead_letters(config: RunConfig) -> list[dict[str, Any]]:
    with open_log(config) as log:
        return list_dead_letters(log)
