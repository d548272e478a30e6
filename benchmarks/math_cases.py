"""The reward `math` and bare math-verify on what math-verify's own tests assert, side by side.

python -m benchmarks.math_cases [folder of math-verify's unpacked source distribution]
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from benchmarks import report
from relax_events.errors import RewardError
from relax_events.rewards.verifiers.math_answers import math

MODULES = (
    "test_all",
    "test_boxed",
    "test_numina_cases",
    "test_open_thoughts",
    "test_strict",
    "test_yujianll",
)
UNTRUE = {(r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$")}
"""Asserted to be equal, and not equal in mathematics."""
REFUSED = "refused"
QUESTION = (
    "The {num_cases} pairs of texts in the tests of math-verify {version}, each graded by "
    "`verify(parse(reference), parse(completion))` and by the"
    " reward `math`; options of `verify` that a test sets are left at their defaults on both "
    "sides. A verdict is right when it is what the test"
    " asserts; the assertions that are untrue in mathematics (pairs: {num_untrue}) count the "
    "other way round."
)


@dataclass(frozen=True)
class Case:
    """A pair of texts, and whether math-verify's tests assert that the second one is right."""

    test: str
    reference: str
    completion: str
    is_asserted: bool

    @property
    def is_true(self) -> bool:
        return self.is_asserted != ((self.reference, self.completion) in UNTRUE)


def cases(folder: Path) -> Iterator[Case]:
    """Read the cases from the parameters of math-verify's tests; options of `verify` that a case
    sets are left out."""
    sys.path.insert(0, str(folder))
    for module in MODULES:
        tests = importlib.import_module(f"tests.{module}")
        for name, test in vars(tests).items():
            marks = (
                getattr(test, "pytestmark", ())
                if getattr(test, "__module__", "") == tests.__name__
                else ()
            )
            for mark in marks:
                names = [part.strip() for part in mark.args[0].split(",")]
                for row in mark.args[1]:
                    case = dict(zip(names, row, strict=True))
                    yield Case(
                        name,
                        case["gold"],
                        case["pred"],
                        bool(case.get("expected", case.get("result"))),
                    )


def bare(case: Case) -> str:
    """Grade a case as math-verify's own page shows it."""
    return str(int(verify(parse(case.reference), parse(case.completion))))


def ours(case: Case) -> str:
    """Grade a case by the reward `math`."""
    try:
        return str(int(math(case.completion, answer=case.reference, metadata={}, prompt="")))
    except (RewardError, ValueError):
        return REFUSED


def is_right(verdict: str, *, wanted: bool) -> bool:
    """Tell whether a verdict agrees; what is refused has at least not been rewarded."""
    return verdict == "1" if wanted else verdict != "1"


def unpacked(folder: str) -> Path:
    """Download math-verify's source distribution, of the version that is installed, into a
    folder."""
    wanted = f"math-verify=={version('math-verify')}"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            folder,
            wanted,
        ],
        check=True,
    )
    archive = next(Path(folder).glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return Path(str(archive).removesuffix(".tar.gz"))


def main() -> None:
    """Grade all cases and write the page."""
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        found = list(cases(Path(sys.argv[1]) if len(sys.argv) > 1 else unpacked(folder)))
    graded = [(case, bare(case), ours(case)) for case in found]
    numbers: dict[str, Counter[str]] = {}
    for case, theirs, mine in graded:
        row = numbers.setdefault(case.test, Counter())
        row["cases"] += 1
        row["math-verify"] += is_right(theirs, wanted=case.is_true)
        row["ours"] += is_right(mine, wanted=case.is_true)
    total = Counter[str]()
    for row in numbers.values():
        total.update(row)
    rows: list[dict[str, Any]] = [
        {"test": name, **row} for name, row in [*numbers.items(), ("all", total)]
    ]
    apart = [
        {
            "reference": f"`{case.reference[-60:]}`",
            "completion": f"`{case.completion[-60:]}`",
            "asserted": int(case.is_asserted),
        }
        | {"math-verify": theirs, "ours": mine}
        for case, theirs, mine in graded
        if theirs != mine
    ]
    report.write(
        "math-cases",
        title="The reward `math` on math-verify's own tests",
        question=QUESTION.format(
            num_cases=len(found), version=version("math-verify"), num_untrue=len(UNTRUE)
        ),
        command="python -m benchmarks.math_cases",
        tables={"Right verdicts": rows, "Where the verdicts differ": apart},
        conclusion=f"Of {total['cases']} verdicts bare math-verify has {total['math-verify']} right, "
        f"the reward `math` {total['ours']};"
        f" {len(apart)} differ. [The reference](../reference/rewards.md) says why.",
    )


if __name__ == "__main__":
    main()
