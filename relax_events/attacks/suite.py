"""All attacks on the product's own walls, and their outcomes.

    assault (an entry point, its doors) --> prepare the real thing --> attacks, one by one
                                                  |                       |
                                              targets outside <-- their traces

An assault prepares its target once, for all its attacks: the product's own pool of children,
server, reader or sandbox. An attack reports itself what it achieved at the entry point: a better
score, an answer that it must not get, a request of others that failed. The targets show the rest:
files, sockets, processes and memory outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic

from relax_events.attacks.targets import Targets, create_targets
from relax_events.attacks.user_code import SECRETS
from relax_events.confinement.entry_points import Door
from relax_events.errors import RelaxError

HELD = ""


class NotPossible(Exception):  # no error: the machine lacks the target
    """A program that an assault needs is not installed on this machine, so it has no target."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: The effect that it tries to have; unique in its assault.
        run: Makes it, and returns what it achieved; `HELD` if nothing.
    """

    name: str
    run: Callable[[], str]


Prepare = Callable[[Targets], AbstractContextManager[Iterable[Attack]]]


@dataclass(frozen=True, slots=True)
class Assault:
    """The attacks on an entry point.

    Attributes:
        target: Name of the entry point, or of a profile.
        doors: The doors by which they come.
        walls: The profile or the bounds, in a word.
        prepare: Prepares the target, and yields the attacks.
        part: Tells assaults on one entry point apart.
    """

    target: str
    doors: tuple[Door, ...]
    walls: str
    prepare: Prepare
    part: str = ""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.target}: {self.part}" if self.part else self.target


@dataclass(frozen=True, slots=True)
class Broken:
    """An attack that achieved something."""

    attack: str
    seen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an assault.

    Attributes:
        assault: The assault.
        num_attacks: Number of attacks that were made.
        broken: The attacks that achieved something.
        not_possible: Why no attack was made; empty otherwise.
        seconds: How long it took.
    """

    assault: Assault
    num_attacks: int
    broken: tuple[Broken, ...]
    not_possible: str = ""
    seconds: float = 0.0


def run_assault(assault: Assault) -> Outcome:
    """Make all attacks of an assault. An error of the product while it prepares counts as broken:
    nothing can be said of walls that were not reached.
    """
    begin, made = monotonic(), list[str]()
    broken: list[Broken] = []
    try:
        with create_targets() as targets:
            try:
                with assault.prepare(targets) as attacks:
                    broken += _attack(attacks, targets, made)
            except RelaxError as error:
                broken.append(Broken("before the first attack", (str(error),)))
            if left := (*targets.list_traces(), *targets.list_changes()):
                broken.append(Broken("all of them together", left))
    except NotPossible as reason:
        return Outcome(assault, 0, (), str(reason), monotonic() - begin)
    return Outcome(assault, len(made), tuple(broken), seconds=monotonic() - begin)


def _attack(attacks: Iterable[Attack], targets: Targets, made: list[str]) -> Iterator[Broken]:
    for attack in attacks:
        made.append(attack.name)
        achieved = attack.run()
        seen = (*([achieved] if achieved else []), *targets.list_traces())
        if seen:
            yield Broken(attack.name, seen)


@contextmanager
def _secrets() -> Iterator[None]:
    """Have secrets in this process's variables, which no child may get."""
    added = [name for name in SECRETS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def run_suite(
    assaults: Sequence[Assault],
    *,
    num_threads: int = 2,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Make the attacks of several assaults side by side.

    Args:
        assaults: The assaults to make.
        num_threads: So many at a time.
        on_outcome: Called for each outcome, in the order of the assaults.
    """
    outcomes = []
    with _secrets(), ThreadPoolExecutor(num_threads, thread_name_prefix="attacks") as threads:
        for outcome in threads.map(run_assault, assaults):
            on_outcome(outcome)
            outcomes.append(outcome)
    return outcomes
