"""Roles, engines and trainer backends are entry points, so that nothing here knows them all and anyone can add one."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from relax_events.errors import ConfigError

ROLES = "relax_events.roles"
ENGINES = "relax_events.engines"
TRAINER_BACKENDS = "relax_events.trainer_backends"


def find_plugin(group: str, name: str, *, what: str) -> EntryPoint:
    """Return an installed entry point, not loaded yet.

    Args:
        group: One of the groups above.
        name: Of the plugin.
        what: How the error calls it, for example `engine.name = 'vroom'`.
    Raises:
        ConfigError: None of that name is installed; the text lists those that are.
    """
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        raise ConfigError(f"{what} is not installed; installed are {', '.join(sorted(installed))}")
    return installed[name]
