"""Holds faults in a running stack until somebody is woken, then mends them: `make stack-alerts`.

For each fault: the alert that should fire does, on the stack's Prometheus; no other does; somebody
    is told of it by Alertmanager and Apprise; and
it clears once the fault is over. At the end the run is brought to its goal and the ledger is
checked.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks import report
from tests.stack.container_engine import Engine, StackError, exit_code_of, open_engine
from tests.stack.faults import RUN_FILES, FaultRun
from tests.stack.images import Stopwatch, provide_images
from tests.stack.prometheus import ask
from tests.stack.webhook_sink import Told, somebody_told
from tests.stack.volumes import VOLUME_OF, fill, free

FIRES_SECONDS, TOLD_SECONDS, CLEARS_SECONDS = 600.0, 60.0, 900.0
TURN_SECONDS = 2.0
QUESTION = """The quickstart's task in containers, and one fault after the other, each held until Prometheus fires the alert that names it, then
mended. Seconds from the fault to the alert, from there until Alertmanager and Apprise have told somebody outside of the stack, and from the
fault's end until no alert fires any more."""
COLUMNS = (
    "fault",
    "alert",
    "fired after, s",
    "told after, s",
    "cleared after, s",
    "what went wrong",
)
FREE = 0.05
"""Of a volume that is nearly full."""
NO_EVENT = """
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": "kafka:9092"})
producer.produce("relax.faults.rollout.samples", b"no event", partition=0)
assert producer.flush(30) == 0
"""


@dataclass(frozen=True)
class Held:
    """A fault that is held until somebody is woken."""

    name: str
    alert: str
    role: str
    begin: Callable[[Engine], object]
    end: Callable[[Engine], object]

    @property
    def woken_by(self) -> str:
        """The alert, with the role it names."""
        return f"{self.alert} {self.role}".strip()

    def is_named_by(self, alert: str) -> bool:
        """Whether an alert, with the role it names, is the one; without a role of its own the fault
        may concern several.
        """
        return alert == self.woken_by or (not self.role and alert.startswith(f"{self.alert} "))


def stopped(service: str, alert: str, *, role: str = "") -> Held:
    """A service that somebody has stopped."""
    return Held(
        f"{service} stopped",
        alert,
        role,
        lambda engine: engine.compose("stop", service),
        lambda engine: engine.compose("start", service),
    )


def frozen(service: str, alert: str, *, role: str = "") -> Held:
    """A service that hangs."""
    return Held(
        f"{service} frozen",
        alert,
        role,
        lambda engine: engine.compose("pause", service),
        lambda engine: engine.compose("unpause", service),
    )


def nearly_full(service: str, alert: str) -> Held:
    """A volume that has little room left."""
    volume = VOLUME_OF[service]
    name = f"volume {volume} nearly full"
    return Held(
        name,
        alert,
        "",
        lambda engine: fill(engine, volume, free_fraction=FREE),
        lambda engine: free(engine, volume),
    )


def send_no_event(engine: Engine) -> None:
    """Write a record that no role can read, as a client of somebody else's might."""
    engine.compose(
        "run",
        "--rm",
        "-T",
        "--no-deps",
        "--entrypoint",
        "/opt/relax/bin/python",
        "relax",
        "-c",
        NO_EVENT,
    )


ONE_EACH = ("prompter", "rollout", "reward", "reference", "actor-forward", "advantage", "trainer")
HELD = (
    *(stopped(role, "RelaxRoleWithoutWorker", role=role) for role in ONE_EACH),
    frozen("reward", "RelaxRoleWithoutWorker", role="reward"),
    stopped("controller", "RelaxControllerUnseen"),
    stopped("kafka", "RelaxRunStalled"),
    nearly_full("trainer", "RelaxDiskFilling"),
    Held(
        "record that is no event",
        "RelaxDeadLettersArriving",
        "",
        send_no_event,
        lambda engine: None,
    ),
)


@dataclass(frozen=True)
class Woken:
    """What a held fault did."""

    held: Held
    fired_seconds: float = math.nan
    told_seconds: float = math.nan
    cleared_seconds: float = math.nan
    problem: str = ""

    def rounded_seconds(self) -> list[str]:
        """Return the three times as the page shows them."""
        return [
            f"{seconds:.0f}"
            for seconds in (self.fired_seconds, self.told_seconds, self.cleared_seconds)
        ]


def firing() -> set[str]:
    """Return the alerts that fire, each with the role it names.

    Raises:
        StackError: Prometheus does not answer.
    """
    alerts = [alert["labels"] for alert in ask("alerts")["alerts"] if alert["state"] == "firing"]
    return {f"{labels['alertname']} {labels.get('role', '')}".strip() for labels in alerts}


def hold(engine: Engine, held: Held, told: Told) -> Woken:
    """Hold a fault and say what it did; when something else than its alert came, mend it and wait
    until nothing fires.
    """
    print(f"{held.name:<26}", end="", flush=True)
    try:
        woken = _hold(engine, held, told)
    except StackError as error:
        print(error, flush=True)
        with suppress(StackError):
            _seconds_until(
                lambda: not firing(), time.monotonic(), CLEARS_SECONDS, what="everything clears"
            )
        return Woken(held, problem=str(error))
    seconds = (
        f"fired after {woken.fired_seconds:4.0f} s, told after {woken.told_seconds:3.0f} s, "
        f"cleared after {woken.cleared_seconds:4.0f} s"
    )
    print(f"{held.woken_by:<40} {seconds}", flush=True)
    return woken


def _hold(engine: Engine, held: Held, told: Told) -> Woken:
    """Hold a fault until its alert fires and somebody knows, mend it, and wait until none fires.

    Raises:
        StackError: It did not fire, nobody was told, it did not clear, or another one fired.
    """
    if early := firing():
        raise StackError(f"{held.name}: {', '.join(sorted(early))} fires before the fault")
    told.titles.clear()
    started = time.monotonic()
    held.begin(engine)
    try:
        fired = _seconds_until(
            lambda: bool(_expected(held)),
            started,
            FIRES_SECONDS,
            what=f"{held.name}: {held.woken_by} fires",
        )
        known = _seconds_until(
            lambda: told.has_been_told(held.alert),
            time.monotonic(),
            TOLD_SECONDS,
            what=f"{held.name}: somebody is told",
        )
    finally:
        held.end(engine)
    mended = time.monotonic()
    cleared = _seconds_until(
        lambda: not _expected(held),
        mended,
        CLEARS_SECONDS,
        what=f"{held.name}: {held.woken_by} clears",
    )
    return Woken(held, fired, known, cleared)


def _expected(held: Held) -> set[str]:
    """Return what fires, which nothing may but the alert that is waited for."""
    found = firing()
    if others := {alert for alert in found if not held.is_named_by(alert)}:
        raise StackError(
            f"{held.name}: {', '.join(sorted(others))} fired, where only {held.woken_by} should"
        )
    return found


def _seconds_until(
    condition: Callable[[], bool], started: float, bound: float, *, what: str
) -> float:
    while not condition():
        if time.monotonic() - started > bound:
            raise StackError(f"{what}: not within {bound:g} s")
        time.sleep(TURN_SECONDS)
    return time.monotonic() - started


def write_report(woken: list[Woken], ledger: str, num_steps: int) -> None:
    """Write docs/benchmarks/stack-alerts.md; of faults that were not held this time it keeps what
    it said before.
    """
    page = report.FOLDER / "stack-alerts.json"
    former = json.loads(page.read_text())["rows"] if page.exists() else []
    rows = {
        one.held.name: dict(
            zip(
                COLUMNS,
                (one.held.name, one.held.woken_by, *one.rounded_seconds(), one.problem or "-"),
                strict=True,
            )
        )
        for one in woken
    }
    table = [rows.pop(row["fault"], dict.fromkeys(COLUMNS, "-") | row) for row in former]
    table += rows.values()
    report.write(
        "stack-alerts",
        title="Alerts in the running stack",
        question=QUESTION,
        command=shlex.join(["python", "-m", "tests.stack.alerts", *sys.argv[1:]]),
        conclusion=f"{len(woken)} faults in {num_steps} train steps by this command; "
        f"{sum(not one.problem for one in woken)} fired their alert and "
        "no other, and somebody was told. The run then went on to its goal, and the ledger "
        "is clean. Other rows are of runs before.",
        rows=table,
        data={"held": [one.held.name for one in woken], "ledger": ledger},
    )


def hold_all(chosen: list[Held]) -> None:
    """Start a run, hold each fault in turn, bring the run to its goal, and write the report.

    Raises:
        StackError: An image, the start, an alert, the run or the ledger failed.
    """
    engine = open_engine()
    images = provide_images(engine, Stopwatch())
    run = FaultRun(engine, images["light"])
    with somebody_told(engine, RUN_FILES) as told:
        run.start()
        woken = [hold(engine, held, told) for held in chosen]
        ledger = run.finish()
    print(ledger)
    write_report(woken, ledger, run.num_steps)
    if problems := [one.problem for one in woken if one.problem]:
        raise StackError("; ".join(problems))


def main() -> int:
    """Hold what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults",
        nargs="+",
        metavar="FAULT",
        choices=[held.name for held in HELD],
        default=[held.name for held in HELD],
    )
    names = parser.parse_args().faults
    return exit_code_of(lambda: hold_all([held for held in HELD if held.name in names]))


if __name__ == "__main__":
    sys.exit(main())
