"""Roles are entry points, so that the command line knows none of them and anyone can add one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from relax_events.errors import ConfigError


def load_role(name: str) -> Callable[..., None]:
    """Return the function that runs a role.

    Raises:
        ConfigError: No role of that name is installed; the text lists those that are.
    """
    roles = {entry.name: entry for entry in entry_points(group="relax_events.roles")}
    if name not in roles:
        raise ConfigError(f"role {name!r} is not installed; installed are {', '.join(sorted(roles))}")
    start: Callable[..., None] = roles[name].load()
    return start
