"""`relax doctor --attack`: the product attacks its own walls on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from relax_events.attacks.doors import list_assaults
from relax_events.attacks.suite import Assault, Outcome, run_suite
from relax_events.confinement.entry_points import Door
from relax_events.errors import ConfigError

STDERR = 2
REMEDY = (
    "untrusted input gets through these walls on this machine: update Relax Events and the "
    "kernel, let no run read such data here until then, and report it as SECURITY.md says"
)


@dataclass(frozen=True, slots=True)
class AttackResult:
    """The outcomes of all attacks on an entry point."""

    outcomes: tuple[Outcome, ...]

    @property
    def target(self) -> str:
        """The entry point, or the profile."""
        return self.outcomes[0].assault.target

    @property
    def num_attacks(self) -> int:
        """Number of attacks that were made."""
        return sum(outcome.num_attacks for outcome in self.outcomes)

    @property
    def broken(self) -> list[dict[str, Any]]:
        """The attacks that achieved something, with their observed effects."""
        return [
            {"attack": _name(outcome, broken.attack), "seen": list(broken.seen)}
            for outcome in self.outcomes
            for broken in outcome.broken
        ]

    def describe(self) -> str:
        """Return a line about it, and one for each attack that broke the walls."""
        assault = self.outcomes[0].assault
        skipped = [outcome.not_possible for outcome in self.outcomes if outcome.not_possible]
        broken = self.broken
        ending = f"{len(broken)} BROKE" if broken else "none broke"
        counted = [f"{self.num_attacks} attacks, {ending}"] if self.num_attacks or broken else []
        texts = [*counted, *(f"not attacked: {reason}" for reason in dict.fromkeys(skipped))]
        lines = [f"{self.target} ({assault.walls}): {'; '.join(texts)}"]
        lines += [f"     {one['attack']}: {'; '.join(one['seen'])}" for one in broken]
        return "\n".join(lines)

    def to_tree(self) -> dict[str, Any]:
        """Return it for programs."""
        reasons = [outcome.not_possible for outcome in self.outcomes if outcome.not_possible]
        doors = {door for outcome in self.outcomes for door in outcome.assault.doors}
        return {
            "target": self.target,
            "doors": sorted(door_name(door) for door in doors),
            "walls": str(self.outcomes[0].assault.walls),
            "attacks": self.num_attacks,
            "broken": self.broken,
            "not_attacked": reasons,
            "seconds": round(sum(outcome.seconds for outcome in self.outcomes), 1),
        }


def _name(outcome: Outcome, attack: str) -> str:
    return f"{outcome.assault.part}: {attack}" if outcome.assault.part else attack


def door_name(door: Door) -> str:
    """Return a door's name as an option has it, such as `judge-reply`."""
    return door.name.lower().replace("_", "-")


def choose_assaults(door: str) -> list[Assault]:
    """Return the assaults by a door; all of them if it is empty.

    Raises:
        ConfigError: There is no such door.
    """
    doors = {door_name(one): one for one in Door}
    if not door:
        return list_assaults()
    if door not in doors:
        raise ConfigError(f"--door must be one of {', '.join(doors)}, got {door!r}")
    return [assault for assault in list_assaults() if doors[door] in assault.doors]


def attack_this_machine(
    assaults: Sequence[Assault], *, on_result: Callable[[AttackResult], None]
) -> tuple[list[AttackResult], Path | None]:
    """Make the attacks; return the results, and the log of the attacked parts' output if an attack
    succeeded.

    Args:
        assaults: Assaults on one entry point stand together.
        on_result: Called for each result, as soon as there is one.
    """
    results: list[AttackResult] = []
    outcomes: list[Outcome] = []
    groups = iter([len(list(some)) for _, some in groupby(assaults, key=lambda one: one.target)])
    missing = next(groups, 0)

    def add(outcome: Outcome) -> None:
        nonlocal missing
        outcomes.append(outcome)
        missing -= 1
        if not missing:
            results.append(AttackResult(tuple(outcomes)))
            outcomes.clear()
            on_result(results[-1])
            missing = next(groups, 0)

    with _stderr_in_a_file() as log:
        run_suite(assaults, on_outcome=add)
    if any(result.broken for result in results):
        return results, log
    log.unlink()
    return results, None


@contextmanager
def _stderr_in_a_file() -> Iterator[Path]:
    """Keep the output of attacked parts and their children out of the terminal."""
    descriptor, name = tempfile.mkstemp(prefix="relax-attacks-", suffix=".log")
    terminal = os.dup(STDERR)
    os.dup2(descriptor, STDERR)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        os.dup2(terminal, STDERR)
        os.close(terminal)
