"""The product's attacks on its own walls, as `relax doctor --attack` makes them: none achieves
anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from relax_events.attacks.doors import list_assaults
from relax_events.attacks.suite import (
    HELD,
    Assault,
    Attack,
    Broken,
    NotPossible,
    run_assault,
    run_suite,
)
from relax_events.attacks.targets import Targets
from relax_events.confinement.entry_points import Door
from relax_events.errors import ConfigError

pytestmark = [pytest.mark.component, pytest.mark.timeout(900)]
ASSAULTS = {assault.name: assault for assault in list_assaults()}


@pytest.mark.parametrize("name", ASSAULTS)
def test_no_attack_achieves_anything(name: str) -> None:
    (outcome,) = run_suite([ASSAULTS[name]])
    if outcome.not_possible:
        pytest.skip(outcome.not_possible)
    assert outcome.broken == ()
    assert outcome.num_attacks > 0


def assault_of(*attacks: Attack, name: str = "x") -> Assault:
    @contextmanager
    def prepare(_: Targets) -> Iterator[list[Attack]]:
        yield list(attacks)

    return Assault(name, (Door.ROW,), "none", prepare)


def test_suite_sees_what_an_attack_says_and_what_it_leaves_outside() -> None:
    @contextmanager
    def prepare(targets: Targets) -> Iterator[list[Attack]]:
        import socket
        from pathlib import Path

        def create() -> str:
            targets.canary.touch()
            return HELD

        def connect() -> str:
            with socket.create_connection(("127.0.0.1", targets.outside["port"])):
                return HELD

        def change() -> str:
            Path(targets.outside["private"]).write_text("other")
            return HELD

        yield [
            Attack("says", partial(str, "got a better score")),
            Attack("creates", create),
            Attack("connects", connect),
            Attack("changes", change),
            Attack("nothing", lambda: HELD),
        ]

    outcome = run_assault(Assault("x", (Door.ROW,), "none", prepare))
    assert outcome.broken == (
        Broken("says", ("got a better score",)),
        Broken("creates", ("CREATED the canary",)),
        Broken("connects", ("CONNECTED to the port",)),
        Broken("all of them together", ("CHANGED private",)),
    )
    assert outcome.num_attacks == 5


def test_walls_that_can_not_be_reached_count_as_broken() -> None:
    @contextmanager
    def fail(_: Targets) -> Iterator[list[Attack]]:
        raise ConfigError("no such reward")
        yield []

    outcome = run_assault(Assault("x", (), "none", fail))
    assert outcome.broken == (Broken("before the first attack", ("no such reward",)),)


def test_what_is_not_installed_is_not_attacked() -> None:
    @contextmanager
    def miss(_: Targets) -> Iterator[list[Attack]]:
        raise NotPossible("megatron-core is not installed")
        yield []

    outcome = run_assault(Assault("x", (), "none", miss))
    assert (outcome.not_possible, outcome.broken) == ("megatron-core is not installed", ())


def test_outcomes_come_in_the_order_of_the_assaults() -> None:
    names = [str(number) for number in range(5)]
    seen: list[str] = []
    run_suite(
        [assault_of(name=name) for name in names],
        on_outcome=lambda outcome: seen.append(outcome.assault.name),
    )
    assert seen == names
