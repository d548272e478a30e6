"""Hold faults in a running stack until the expected alert fires, then end them: `make
stack-alerts`.

For each fault: the expected alert fires on the stack's Prometheus, and no other; Alertmanager and
Apprise send a notification; and the alert clears after the fault. At the end the run reaches its
goal and the ledger is checked.
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
from tests.stack.container_engine import (
    ContainerEngine,
    StackError,
    exit_code_of,
    open_container_engine,
)
from tests.stack.faults import RUN_FILES, FaultRun
from tests.stack.images import Stopwatch, provide_images
from tests.stack.prometheus import query_prometheus
from tests.stack.volumes import VOLUME_OF, fill, free
from tests.stack.webhook_sink import WebhookSink, open_webhook_sink

FIRES_SECONDS, NOTIFIED_SECONDS, CLEARS_SECONDS = 600.0, 60.0, 900.0
TURN_SECONDS = 2.0
QUESTION = """The quickstart's task in containers, and one fault after the other,
each held until Prometheus fires the expected alert, then ended. Seconds from the fault to the
alert, from the alert to the notification by Alertmanager and Apprise outside of the stack, and
from the end of the fault until no alert fires."""
COLUMNS = (
    "fault",
    "alert",
    "fired after, s",
    "notified after, s",
    "cleared after, s",
    "what went wrong",
)
FREE = 0.05
"""Free fraction of a volume that is nearly full."""
UNDECODABLE_RECORD = """
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": "kafka:9092"})
producer.produce("relax.faults.rollout.samples", b"no event", partition=0)
assert producer.flush(30) == 0
"""


@dataclass(frozen=True)
class HeldFault:
    """A fault that is held until its alert has been sent."""

    name: str
    alert: str
    role: str
    begin: Callable[[ContainerEngine], object]
    end: Callable[[ContainerEngine], object]

    @property
    def alert_label(self) -> str:
        """The alert name, and its role label if any."""
        return f"{self.alert} {self.role}".strip()

    def is_named_by(self, alert: str) -> bool:
        """Whether an alert with its role label is the expected one; a fault without a role accepts
        any role.
        """
        return alert == self.alert_label or (not self.role and alert.startswith(f"{self.alert} "))


def stopped(service: str, alert: str, *, role: str = "") -> HeldFault:
    """Build the fault of a stopped service."""
    return HeldFault(
        f"{service} stopped",
        alert,
        role,
        lambda engine: engine.compose("stop", service),
        lambda engine: engine.compose("start", service),
    )


def frozen(service: str, alert: str, *, role: str = "") -> HeldFault:
    """Build the fault of a service that hangs."""
    return HeldFault(
        f"{service} frozen",
        alert,
        role,
        lambda engine: engine.compose("pause", service),
        lambda engine: engine.compose("unpause", service),
    )


def nearly_full(service: str, alert: str) -> HeldFault:
    """Build the fault of a volume that is nearly full."""
    volume = VOLUME_OF[service]
    name = f"volume {volume} nearly full"
    return HeldFault(
        name,
        alert,
        "",
        lambda engine: fill(engine, volume, free_fraction=FREE),
        lambda engine: free(engine, volume),
    )


def send_undecodable_record(engine: ContainerEngine) -> None:
    """Write a record that no role can decode, as a foreign client might."""
    engine.compose(
        "run",
        "--rm",
        "-T",
        "--no-deps",
        "--entrypoint",
        "/opt/relax/bin/python",
        "relax",
        "-c",
        UNDECODABLE_RECORD,
    )


ONE_EACH = ("prompter", "rollout", "reward", "reference", "actor-forward", "advantage", "trainer")
HELD_FAULTS = (
    *(stopped(role, "RelaxRoleWithoutWorker", role=role) for role in ONE_EACH),
    frozen("reward", "RelaxRoleWithoutWorker", role="reward"),
    stopped("controller", "RelaxControllerSilent"),
    stopped("kafka", "RelaxRunStalled"),
    nearly_full("trainer", "RelaxDiskFilling"),
    HeldFault(
        "record that is no event",
        "RelaxDeadLettersArriving",
        "",
        send_undecodable_record,
        lambda engine: None,
    ),
)


@dataclass(frozen=True)
class AlertResult:
    """The result of a held fault."""

    held: HeldFault
    fired_seconds: float = math.nan
    notified_seconds: float = math.nan
    cleared_seconds: float = math.nan
    problem: str = ""

    def rounded_seconds(self) -> list[str]:
        """Return the three durations as the page shows them."""
        return [
            f"{seconds:.0f}"
            for seconds in (self.fired_seconds, self.notified_seconds, self.cleared_seconds)
        ]


def firing() -> set[str]:
    """Return the firing alerts, each with its role label.

    Raises:
        StackError: Prometheus does not respond.
    """
    alerts = [
        alert["labels"]
        for alert in query_prometheus("alerts")["alerts"]
        if alert["state"] == "firing"
    ]
    return {f"{labels['alertname']} {labels.get('role', '')}".strip() for labels in alerts}


def hold(engine: ContainerEngine, held: HeldFault, sink: WebhookSink) -> AlertResult:
    """Hold a fault and return the result; if another alert fires, end the fault and wait until
    nothing fires.
    """
    print(f"{held.name:<26}", end="", flush=True)
    try:
        woken = _hold(engine, held, sink)
    except StackError as error:
        print(error, flush=True)
        with suppress(StackError):
            _seconds_until(
                lambda: not firing(), time.monotonic(), CLEARS_SECONDS, what="everything clears"
            )
        return AlertResult(held, problem=str(error))
    seconds = (
        f"fired after {woken.fired_seconds:4.0f} s, notified after "
        f"{woken.notified_seconds:3.0f} s, "
        f"cleared after {woken.cleared_seconds:4.0f} s"
    )
    print(f"{held.alert_label:<40} {seconds}", flush=True)
    return woken


def _hold(engine: ContainerEngine, held: HeldFault, sink: WebhookSink) -> AlertResult:
    """Hold a fault until its alert fires and is sent, end it, and wait until no alert fires.

    Raises:
        StackError: It did not fire, the webhook sink was not notified, it did not clear, or another
            one fired.
    """
    if early := firing():
        raise StackError(f"{held.name}: {', '.join(sorted(early))} fires before the fault")
    sink.documents.clear()
    started = time.monotonic()
    held.begin(engine)
    try:
        fired = _seconds_until(
            lambda: bool(_expected(held)),
            started,
            FIRES_SECONDS,
            what=f"{held.name}: {held.alert_label} fires",
        )
        known = _seconds_until(
            lambda: sink.has_received(held.alert),
            time.monotonic(),
            NOTIFIED_SECONDS,
            what=f"{held.name}: the notification arrives",
        )
    finally:
        held.end(engine)
    ended = time.monotonic()
    cleared = _seconds_until(
        lambda: not _expected(held),
        ended,
        CLEARS_SECONDS,
        what=f"{held.name}: {held.alert_label} clears",
    )
    return AlertResult(held, fired, known, cleared)


def _expected(held: HeldFault) -> set[str]:
    """Return the firing alerts; any other than the expected one is an error."""
    found = firing()
    if others := {alert for alert in found if not held.is_named_by(alert)}:
        raise StackError(
            f"{held.name}: {', '.join(sorted(others))} fired, where only {held.alert_label} should"
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


def write_report(results: list[AlertResult], ledger: str, num_steps: int) -> None:
    """Write .relax/benchmarks/stack-alerts.md; rows of faults that were not held this time are
    kept.
    """
    page = report.FOLDER / "stack-alerts.json"
    former = json.loads(page.read_text())["rows"] if page.exists() else []
    rows = {
        one.held.name: dict(
            zip(
                COLUMNS,
                (one.held.name, one.held.alert_label, *one.rounded_seconds(), one.problem or "-"),
                strict=True,
            )
        )
        for one in results
    }
    table = [rows.pop(row["fault"], dict.fromkeys(COLUMNS, "-") | row) for row in former]
    table += rows.values()
    report.write(
        "stack-alerts",
        title="Alerts in the running stack",
        question=QUESTION,
        command=shlex.join(["python", "-m", "tests.stack.alerts", *sys.argv[1:]]),
        conclusion=f"{len(results)} faults in {num_steps} train steps by this command; "
        f"{sum(not one.problem for one in results)} fired their alert and "
        "no other, and the webhook sink was notified. The run then went on to its goal, and "
        "the ledger "
        "is clean. Other rows are of earlier runs.",
        rows=table,
        data={"held": [one.held.name for one in results], "ledger": ledger},
    )


def hold_all(chosen: list[HeldFault]) -> None:
    """Start a run, hold each fault in turn, bring the run to its goal, and write the report.

    Raises:
        StackError: An image, the start, an alert, the run or the ledger failed.
    """
    engine = open_container_engine()
    images = provide_images(engine, Stopwatch())
    run = FaultRun(engine, images["light"])
    with open_webhook_sink(engine, RUN_FILES) as sink:
        run.start()
        results = [hold(engine, held, sink) for held in chosen]
        ledger = run.finish()
    print(ledger)
    write_report(results, ledger, run.num_steps)
    if problems := [one.problem for one in results if one.problem]:
        raise StackError("; ".join(problems))


def main() -> int:
    """Hold the faults that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults",
        nargs="+",
        metavar="FAULT",
        choices=[held.name for held in HELD_FAULTS],
        default=[held.name for held in HELD_FAULTS],
    )
    names = parser.parse_args().faults
    return exit_code_of(lambda: hold_all([held for held in HELD_FAULTS if held.name in names]))


if __name__ == "__main__":
    sys.exit(main())
