"""Fuzz all targets in turn: python -m tests.fuzz --minutes 60. Exit code 6 when an input broke
one."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from dataclasses import asdict

from tests.fuzz.driver import ROOT, Report, run_target
from tests.fuzz.target import SCRATCH
from tests.fuzz.targets import TARGETS

SUMMARY = ROOT / ".relax" / "fuzz.json"


def main() -> int:
    """Run the targets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the first target; another one each time when it is not given",
    )
    parser.add_argument("--targets", nargs="*", default=[])
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    seconds = arguments.minutes * 60 / len(names)
    reports = []
    for index, name in enumerate(names):
        reports.append(
            report := run_target(TARGETS[name], seconds=seconds, seed=seed + index * 1_000_000)
        )
        print(line_of(report), flush=True)
        SUMMARY.parent.mkdir(exist_ok=True)
        SUMMARY.write_text(
            json.dumps({"seed": seed, "targets": [asdict(one) for one in reports]}, indent=1)
        )
    total, broken = (
        sum(report.executions for report in reports),
        [report for report in reports if report.crashes],
    )
    print(
        f"{total} executions, {sum(len(report.crashes) for report in broken)} crashes in "
        f"{len(broken)} of {len(reports)} targets; {SUMMARY}"
    )
    return 6 if broken else 0


def line_of(report: Report) -> str:
    """Show a report."""
    slowest = f"slowest {report.slowest_seconds * 1000:.0f} ms of {report.slowest_bytes} bytes"
    lines = [
        (
            f"{report.target:20} {report.executions:9} executions in {report.seconds:.0f} s, "
            f"{slowest}, memory +{report.grown_bytes >> 20} MiB"
        )
    ]
    return "\n".join([*lines, *(f"    {what}: {file}" for what, file in report.crashes.items())])


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
