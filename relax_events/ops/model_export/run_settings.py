"""The settings of a run as its log describes them, which a run file alone may not have."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.data.rendering import read_run_template
from relax_events.errors import ConfigError
from relax_events.projections.run_state import RunState
from relax_events.runtime.run_description import read_described_config
from relax_events.session.defaults import resolve_defaults


def choose_template(config: RunConfig, state: RunState) -> str:
    """Return the chat template that a run trained with: that of the log, and only where the log of
    an earlier release has none, that of the files as they are now; empty without one.

    Args:
        config: The run.
        state: The folded control log.
    Raises:
        ConfigError: The log has none, and the file can't be read.
    """
    if state.description is not None and state.description.chat_template:
        return state.description.chat_template
    return read_run_template(config.data, config.model.path)


def as_described(config: RunConfig, state: RunState) -> RunConfig:
    """Return a run's settings as its newest description on the log has them, with the broker, the
    files and the object store of `config`.

    Args:
        config: The run file, or the log's description itself.
        state: The folded control log.
    Raises:
        ConfigError: The log does not describe the run, and the run file does not fit this machine.
    """
    if state.description is None:
        return resolve_defaults(config)[0]
    try:
        described_config = read_described_config(
            state.description, run_id=config.run.id, reader_config=config
        )
    except ConfigError:  # an earlier release wrote it
        return resolve_defaults(config)[0]
    local_values = {
        "run": {"directory": config.run.directory},
        "model": {"path": config.model.path},
        "data": {"chat_template_file": config.data.chat_template_file},
    }
    sections = {
        name: getattr(described_config, name).model_copy(update=values)
        for name, values in local_values.items()
    }
    return described_config.model_copy(
        update=sections | {"broker": config.broker, "objects": config.objects}
    )
