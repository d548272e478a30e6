"""Foreign interfaces of environments, adapted to sessions. Adapters are loaded in child processes
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_events.environments.interfaces.gymnasium import GymnasiumAdapter
from relax_events.environments.interfaces.interaction import InteractionAdapter
from relax_events.environments.interfaces.mcp_tools import McpAdapter
from relax_events.environments.interfaces.openenv import OpenEnvAdapter
from relax_events.environments.interfaces.protocol import Adapter
from relax_events.environments.interfaces.server_bounds import ServerBounds
from relax_events.environments.interfaces.skyrl_gym import SkyrlGymAdapter
from relax_events.plugins import ENVIRONMENTS, FUNCTION, find_plugin


def load_adapter(setup: Mapping[str, Any]) -> Adapter:
    """Load what a run file names as its environment.

    Args:
        setup: The section `environment` as JSON.
    Raises:
        ConfigError: There is no such class or function, or its file fails to load.
        EnvironmentProblem: A package is missing.
    """
    interface, options = setup["interface"], setup["options"]
    if interface == "openenv":
        return OpenEnvAdapter(setup["address"], options, bounds=ServerBounds.of(setup))
    if interface == "mcp":
        return McpAdapter(setup["tool_servers"], bounds=ServerBounds.of(setup))
    name = setup["function"]
    build = find_plugin(
        ENVIRONMENTS, name, what=f"environment.function = {name!r}", accepts=FUNCTION
    ).load()
    if interface == "interaction":
        return InteractionAdapter(build, options)
    if interface == "gymnasium":
        return GymnasiumAdapter(build, options)
    return SkyrlGymAdapter(build, options, max_turns=setup["max_turns"])
