"""What the subcommands share: the run behind a run file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.admin import Admin


@contextmanager
def open_run(
    config: Path, overrides: tuple[str, ...], *, may_be_new: bool = False
) -> Iterator[tuple[RunConfig, Admin]]:
    """Give the run with its broker's address filled in, and an admin client of that broker, which
    has answered.

    Args:
        config: The run file.
        overrides: Laid over it.
        may_be_new: Whether the broker need not know the run.
    Raises:
        ConfigError: The broker does not know the run, and should.
    """
    from relax_events.config import load_run_config
    from relax_events.session.broker_address import attach, open_admin, require_run
    from relax_events.topics import TopicPlan

    with (
        attach(load_run_config(config, overrides), by="relax topics") as settings,
        closing(open_admin(settings, name="topics")) as admin,
    ):
        if not may_be_new:
            require_run(settings, admin.topics(TopicPlan.from_config(settings).topic("")))
        yield settings, admin
