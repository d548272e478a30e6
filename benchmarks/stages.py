"""What each stage of the quickstart costs in its steady state: processor time and context switches
a sample, by role. With `--before CHECKOUT` another checkout takes turns with this one.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import psutil

from benchmarks import report
from benchmarks.trl import ASYNC, OBJECTIVE, STREAMING

CONFIG = Path("configs/quickstart.toml")
"""Each checkout's own."""
SAMPLES_PER_STEP = 256
FIRST_STEADY_STEP = 10
STEP_LINE = re.compile(r"(?:[\d:]+  )?step (\d+)/")
SETTINGS = {
    "async K=1": (*OBJECTIVE, *ASYNC),
    "async K=1, hybrid": (*OBJECTIVE, *ASYNC, "workers.hybrid=true"),
    "on-policy, streaming": (*OBJECTIVE, *STREAMING),
    "async K=1, all roles": ASYNC,
    "async K=1, all roles, hybrid": (*ASYNC, "workers.hybrid=true"),
}
ALL = "all"
BROKER, RUN, DECODER = "broker", "relax run", "decoder"


@dataclass(frozen=True, slots=True)
class Used:
    """What the processes of a role used: seconds of processor time, context switches."""

    user: float = 0.0
    system: float = 0.0
    voluntary: float = 0.0
    involuntary: float = 0.0

    def __add__(self, other: Used) -> Used:
        return Used(
            self.user + other.user,
            self.system + other.system,
            self.voluntary + other.voluntary,
            self.involuntary + other.involuntary,
        )

    def __mul__(self, factor: float) -> Used:
        return Used(
            factor * self.user,
            factor * self.system,
            factor * self.voluntary,
            factor * self.involuntary,
        )


@dataclass(frozen=True, slots=True)
class Look:
    """One measurement: the trained step, the time in seconds, and what each process has used since
    its start.
    """

    step: int
    at: float
    used: dict[psutil.Process, tuple[str, Used]]


def read_role(process: psutil.Process, earlier_roles: dict[psutil.Process, str]) -> str:
    """Tell a process's role by its command line; what a worker starts counts to its role, but for
    the decoder of media.

    Args:
        process: Of a run.
        earlier_roles: Roles of the processes that ran before.
    """
    words: list[str] = process.cmdline()
    if "kafka.Kafka" in words:
        return BROKER
    if "relax_events.media.decoder_child" in words:
        return DECODER
    if "worker" in words[:-1]:
        return words[words.index("worker") + 1]
    return earlier_roles.get(process.parent() or process, RUN)


def roles_below(
    root: psutil.Process, earlier_roles: dict[psutil.Process, str]
) -> dict[psutil.Process, str]:
    """Return the roles of a process and of all below it that live, the parents before their
    children.

    Args:
        root: The process.
        earlier_roles: Keeps the roles for the next call, without processes that were just forked:
            these still have their parent's command line.
    """
    living, passing = [root, *root.children(recursive=True)], dict[psutil.Process, str]()
    for process in living:
        if process not in earlier_roles:
            try:
                kept = passing if is_as_forked(process) else earlier_roles
                kept[process] = read_role(process, earlier_roles | passing)
            except psutil.Error:
                continue
    roles = earlier_roles | passing
    return {process: roles[process] for process in living if process in roles}


def is_as_forked(process: psutil.Process) -> bool:
    """Tell whether a process may still be about to become another program."""
    parent = process.parent()
    return parent is not None and process.cmdline() == parent.cmdline()


def used_by(process: psutil.Process) -> Used:
    """Return what a process has used; psutil counts the switches of its main thread alone."""
    times, switches = process.cpu_times(), [0, 0]
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        status = (thread / "status").read_text()
        for index, name in enumerate(("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")):
            switches[index] += int(status.split(f"\n{name}:", 1)[1].split("\n", 1)[0])
    return Used(times.user, times.system, *switches)


def look(root: psutil.Process, step: int, earlier_roles: dict[psutil.Process, str]) -> Look:
    """Measure the process and all below it."""
    used = {}
    for process, role in roles_below(root, earlier_roles).items():
        try:
            used[process] = role, used_by(process)
        except (psutil.Error, OSError, IndexError):
            continue  # it, or one of its threads, has just ended
    return Look(step, time.monotonic(), used)


@dataclass(frozen=True, slots=True)
class Steady:
    """The steady state of a run: samples a second, and what one used, by role."""

    rate: float
    used: dict[str, Used]

    @property
    def total(self) -> Used:
        """What a sample used in all processes."""
        return sum(self.used.values(), Used())


def run(checkout: Path, folder: Path, overrides: Sequence[str], num_steps: int) -> Steady:
    """Run the quickstart of a checkout, and measure its steady state."""
    paths = [f"run.directory={folder}", f"model.path={folder}/model"]
    command = [sys.executable, "-m", "relax_events.cli", "run", str(checkout / CONFIG), *paths]
    steps = f"run.num_steps={num_steps}"
    process = subprocess.Popen(
        [*command, steps, *overrides],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    root, earlier_roles = psutil.Process(process.pid), dict[psutil.Process, str]()
    looks, printed = list[Look](), list[str]()
    for line in process.stdout or ():
        printed.append(line)
        match = STEP_LINE.match(line)
        if match and FIRST_STEADY_STEP <= int(match[1]) < num_steps - 2:
            looks = [*looks[:1], look(root, int(match[1]), earlier_roles)]
    if process.wait() or len(looks) < 2:
        raise SystemExit(f"no steady steps were seen; the run said:\n{''.join(printed)[-2000:]}")
    return between(*looks)


def between(first: Look, last: Look) -> Steady:
    """Return the rate from one look to another, and what each role used for a sample."""
    by_role: dict[str, Used] = defaultdict(Used)
    for process, (role, used) in last.used.items():
        by_role[role] += used + first.used.get(process, (role, Used()))[1] * -1
    number = (last.step - first.step) * SAMPLES_PER_STEP
    return Steady(
        number / (last.at - first.at),
        {role: used * (1 / number) for role, used in by_role.items()},
    )


Rounds = Sequence[Steady]


def median(rounds: Rounds, role: str, value: Callable[[Used], float]) -> float:
    """Return the median of what a role used, or of what all did."""
    return statistics.median(
        value(one.total if role == ALL else one.used.get(role, Used())) for one in rounds
    )


def median_rate(rounds: Rounds) -> float:
    """Return the median of the samples a second."""
    return statistics.median(one.rate for one in rounds)


def milliseconds(used: Used) -> float:
    """Return the processor time of user and kernel."""
    return 1000 * (used.user + used.system)


def rows(after: Rounds, before: Rounds = ()) -> list[dict[str, str]]:
    """Lay out the roles, largest use first.

    Args:
        after: Of this checkout: what a sample used by role, round by round.
        before: Of the other one.
    """
    roles = sorted((ALL, *after[0].used), key=lambda role: -median(after, role, milliseconds))
    return [
        {
            "role": role,
            **(
                {"ms a sample, before": f"{median(before, role, milliseconds):.3f}"}
                if before
                else {}
            ),
            "ms a sample": f"{median(after, role, milliseconds):.3f}",
            "of it kernel": f"{median(after, role, lambda used: 1000 * used.system):.3f}",
            "voluntary switches": f"{median(after, role, lambda used: used.voluntary):.2f}",
            "involuntary": f"{median(after, role, lambda used: used.involuntary):.2f}",
        }
        for role in roles
    ]


def rate_rows(after: Mapping[str, Rounds], before: Mapping[str, Rounds]) -> list[dict[str, str]]:
    """Lay out what was trained a second, and how much of its former time a sample takes."""
    rows = []
    for name, rounds in after.items():
        row = {"setting": name, "trained a second": f"{median_rate(rounds):,.0f}"}
        if others := before.get(name):
            ratios = [
                milliseconds(mine.total) / milliseconds(other.total)
                for mine, other in zip(rounds, others, strict=True)
            ]
            row |= {
                "before": f"{median_rate(others):,.0f}",
                "a sample takes, of before": f"{statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
            }
        rows.append(row)
    return rows


def main() -> None:
    """Run all settings in turn, and write the page."""
    parser = argparse.ArgumentParser(description="What each stage of the quickstart costs.")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each setting")
    parser.add_argument("--steps", type=int, default=60, help="train steps of a run")
    parser.add_argument("--before", type=Path, help="another checkout, which takes turns with this")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="these alone")
    arguments = parser.parse_args()
    load, here = os.getloadavg()[0], Path(__file__).parents[1]
    checkouts = [here, *([arguments.before.resolve()] if arguments.before else [])]
    rounds_by_checkout: dict[Path, dict[str, list[Steady]]] = {
        one: defaultdict(list) for one in checkouts
    }
    with tempfile.TemporaryDirectory(prefix="relax-stages-") as folder:
        for number in range(arguments.rounds):
            for name in arguments.setting or SETTINGS:
                for checkout in checkouts[:: 1 if number % 2 else -1]:
                    steady = run(
                        checkout,
                        Path(folder),
                        [f"run.id=stages-{uuid4().hex[:6]}", *SETTINGS[name]],
                        arguments.steps,
                    )
                    rounds_by_checkout[checkout][name].append(steady)
                    print(
                        f"{checkout.name}, {name}: {milliseconds(steady.total):.2f} ms a sample, "
                        f"{steady.rate:.0f}/s",
                        file=sys.stderr,
                    )
    after, before = (
        rounds_by_checkout[here],
        rounds_by_checkout[checkouts[1]] if arguments.before else {},
    )
    report.write(
        "stages",
        title="What each stage of the quickstart costs",
        command=f"python -m benchmarks.stages --rounds {arguments.rounds} --steps {arguments.steps}"
        + "".join(f" --setting '{name}'" for name in arguments.setting or ())
        + (" --before CHECKOUT" if arguments.before else ""),
        tables={name: rows(rounds, before.get(name, ())) for name, rounds in after.items()}
        | {"Throughput": rate_rows(after, before)},
        data={"load": load}
        | {
            side: {name: [asdict(one) for one in rounds] for name, rounds in taken.items()}
            for side, taken in (("after", after), ("before", before))
        },
    )


if __name__ == "__main__":
    main()
