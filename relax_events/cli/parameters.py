"""Parameters that several commands share, each with its help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.history.cluster import Cluster

RunFile = Annotated[Path, Parameter(help="The run file, TOML.")]
Overrides = Annotated[str, Parameter(help="section.key=value, overrides the run file.")]
Output = Annotated[
    Literal["table", "json"], Parameter(help="A table to read, or JSON for programs.")
]
Yes = Annotated[bool, Parameter(help="Don't ask.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """The broker of a run that is named by its id."""

    config: Path | None = None
    """A run file whose broker is meant."""
    bootstrap_servers: str = ""
    """The cluster that is meant, as host:port,host:port."""
    directory: Path = Path(".relax")
    """Where runs and the embedded broker keep their files."""

    def cluster(self) -> Cluster:
        """Return the cluster that the options select.

        Raises:
            ConfigError: They name two brokers, or the run file is wrong.
        """
        from relax_events.history.cluster import Cluster

        return Cluster.from_options(
            config=self.config,
            bootstrap_servers=self.bootstrap_servers,
            directory=self.directory,
        )

    def find(self, run: str) -> tuple[RunConfig | None, Cluster]:
        """Return a run's file, if the run is named by it, and the cluster that has the run.

        Args:
            run: Its id, or its run file, which names the broker as well.
        Raises:
            ConfigError: Two brokers are named, or a run file is wrong.
        """
        from relax_events.cli.run_reader import is_run_file
        from relax_events.config import load_run_config
        from relax_events.history.cluster import Cluster

        run_file = load_run_config(Path(run)) if is_run_file(run) else None
        return run_file, self.cluster() if run_file is None else Cluster.from_run_file(run_file)

    @contextmanager
    def open_run(self, run: str, *, name: str) -> Iterator[RunConfig]:
        """Give the configuration of a run, with the broker's address and the operator's principal
        filled in.

        Args:
            run: Its id, or its run file.
            name: Of the command.
        Raises:
            RelaxError: Two brokers are named, none answers, or it has no such run.
        """
        from relax_events.errors import ConfigError
        from relax_events.history.runs.listing import read_run

        run_file, cluster = self.find(run)
        with cluster.running(by=f"relax {name}"):
            connection = cluster.connection(name=name)
            summary = read_run(connection, run if run_file is None else run_file.run.id)
            settings = run_file or summary.config
            if settings is None:
                raise ConfigError(
                    f"the log of run {run} does not describe it: it is half deleted; give its run "
                    "file"
                )
            yield settings.model_copy(update={"broker": cluster.broker_with_address})


DEFAULT_BROKER = BrokerOptions()
