"""The attacks by their targets; each module gives its assaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relax_events.attacks.doors.checkpoints import checkpoint_assaults
from relax_events.attacks.doors.contents import content_assaults
from relax_events.attacks.doors.environments import environment_assaults
from relax_events.attacks.doors.http import http_assaults
from relax_events.attacks.doors.judges import judge_assaults
from relax_events.attacks.doors.profiles import profile_assaults
from relax_events.attacks.doors.programs import program_assaults
from relax_events.attacks.doors.readers import reader_assaults
from relax_events.attacks.doors.rewards import reward_assaults
from relax_events.attacks.doors.servers import server_assaults
from relax_events.attacks.doors.stored import stored_assaults
from relax_events.attacks.doors.users import user_assaults
from relax_events.attacks.suite import Assault

SOURCES: tuple[Callable[[], Iterator[Assault]], ...] = (
    checkpoint_assaults,
    http_assaults,
    program_assaults,
    reader_assaults,
    server_assaults,
    judge_assaults,
    environment_assaults,
    reward_assaults,
    user_assaults,
    stored_assaults,
    content_assaults,
    profile_assaults,
)
"""The assaults that take longest come first."""


def list_assaults() -> list[Assault]:
    """Return all assaults; their names are different."""
    return [assault for source in SOURCES for assault in source()]
