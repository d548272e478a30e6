"""Programs that try to pass tests without being right.

Each program is wrong, so its tests must not pass. A part is generated: names that published tests
read, times the ways in which a program can cover a name.
"""

from __future__ import annotations

from relax_events.attacks.covered_names import generate_covers
from relax_events.attacks.deceiving_results import list_results
from relax_events.attacks.forged_verdicts import FORGED_VERDICTS, TESTS
from relax_events.attacks.trick import Trick
from relax_events.attacks.unfinished_tests import list_unfinished


def list_tricks() -> list[Trick]:
    """Return all tricks; their names are different."""
    return [
        *(Trick(name, program, TESTS) for name, program in FORGED_VERDICTS.items()),
        *list_results(),
        *list_unfinished(),
        *generate_covers(),
    ]
