"""Programs of a model against the sandbox and the reward `code`: escapes, limits, and verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from relax_events.attacks.completions import completion_attacks
from relax_events.attacks.doors.rewards import build_item, read_reward
from relax_events.attacks.escapes import ESCAPES
from relax_events.attacks.forged_verdicts import RIGHT, TESTS
from relax_events.attacks.isolation_check import try_escapes
from relax_events.attacks.limits import FILE_LIMITS
from relax_events.attacks.options import UNPROTECTED
from relax_events.attacks.samples import fits_a_record
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.attacks.trick import Trick
from relax_events.attacks.verdict_tricks import list_tricks
from relax_events.config import RewardConfig
from relax_events.confinement.entry_points import GRADED, PROGRAM, find_reward
from relax_events.errors import EnvironmentProblem
from relax_events.rewards.pool import RewardPool
from relax_events.sandbox import Limits, Sandbox, Verdict, require_isolation

MEMORY_BYTES = 256 * 1024**2
LIMIT_SECONDS = 120.0
TEST_SECONDS = 20.0
NUM_PARTS = 2


def program_assaults() -> Iterator[Assault]:
    """Give the assaults of programs."""
    walls = "sandbox"
    yield Assault(PROGRAM.name, PROGRAM.doors, walls, _prepare_escapes, "escapes")
    yield Assault(PROGRAM.name, PROGRAM.doors, walls, _prepare_limits, "limits")
    point = find_reward("code")
    for part in range(NUM_PARTS):
        prepare = partial(_prepare_tricks, part)
        yield Assault(point.name, GRADED, point.profile, prepare, f"verdicts {part + 1}")


@contextmanager
def _prepare_escapes(targets: Targets) -> Iterator[list[Attack]]:
    """All escapes are made by one program."""
    codes = {name: escape.code for name, escape in ESCAPES.items()}
    isolation = require_isolation(allow_unprotected=False)
    succeeded = set(try_escapes(isolation, codes, targets.outside))
    yield [
        *(Attack(name, partial(str, "escaped" if name in succeeded else HELD)) for name in codes),
        *(Attack(f"unprotected = {value!r}", partial(_ask, value)) for value in UNPROTECTED),
    ]


def _ask(value: object) -> str:
    """Ask for less isolation by a value that is not `True`: with isolation it changes nothing."""
    try:
        isolation = require_isolation(allow_unprotected=value)  # type: ignore[arg-type]
    except EnvironmentProblem:
        return HELD
    is_same = isolation == require_isolation(allow_unprotected=False)
    return HELD if is_same else f"{isolation.describe()} was enough"


@contextmanager
def _prepare_limits(_: Targets) -> Iterator[list[Attack]]:
    yield [Attack(name, partial(_exceed, program)) for name, program in FILE_LIMITS.items()]


def _exceed(program: str) -> str:
    limits = Limits(seconds=LIMIT_SECONDS, memory_bytes=MEMORY_BYTES)
    with Sandbox(program, limits, isolation=require_isolation()) as sandbox:
        verdict, _ = sandbox.run_with_input("")
    return HELD if verdict is Verdict.OUT_OF_LIMITS else f"ended as {verdict}"


@contextmanager
def _prepare_tricks(part: int, targets: Targets) -> Iterator[list[Attack]]:
    tricks = [*list_tricks(), *_list_hostile_tests(targets)][part::NUM_PARTS]
    config = RewardConfig(
        function="code",
        options={"test_seconds": TEST_SECONDS},
        timeout_seconds=LIMIT_SECONDS,
        processes=1,
    )
    with RewardPool(config) as pool:
        right = Trick("an honest program", RIGHT, TESTS)
        yield [
            Attack(right.name, lambda: _pass(pool, right, 1.0)),
            *(Attack(trick.name, partial(_pass, pool, trick, 0.0)) for trick in tricks),
        ]


def _list_hostile_tests(targets: Targets) -> Iterator[Trick]:
    """Yield programs whose rows have code in place of tests; it may run, and reach nothing."""
    texts = completion_attacks(targets.canary, port=targets.outside["port"])
    for name, text in texts.items():
        if "," not in name and str(targets.canary) in text and fits_a_record(text):
            yield Trick(f"row: {name}", RIGHT, f"assert f(2) == 5 and {text}")


def _pass(pool: RewardPool, trick: Trick, reward: float) -> str:
    """Score a program with its tests, as a row has them."""
    completion = f"```python\n{trick.program}\n```"
    sample = {"completion": completion, "answer": "", "metadata": {"tests": [trick.tests]}}
    (result,) = pool.score_batch([build_item(sample)])
    return HELD if (read_reward(result) or 0.0) == reward else f"got {result}"
