"""The role that `relax worker` is asked to run."""

from __future__ import annotations

from collections.abc import Callable

from relax_events.plugins import ROLES, find_plugin


def load_role(name: str) -> Callable[..., None]:
    """Return the function that runs a role.

    Raises:
        ConfigError: No role of that name is installed; the text lists those that are.
    """
    start: Callable[..., None] = find_plugin(ROLES, name, what=f"role {name!r}").load()
    return start
