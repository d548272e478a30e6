"""Render the chart with each of its values files into deploy/helm/rendered, which the tests check
where helm is not installed: `make charts`.

HELM names the program, by default `helm`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from deploy.generate import CHART

RENDERED = CHART.parent / "rendered"
KUBERNETES = "1.34.0"
RUN_FILE = "# the run file"
SECONDS = 120.0


def find_values() -> dict[str, Path]:
    """Return the values files of the chart, by the name of the release that is rendered."""
    return {path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("values-*.yaml"))}


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run helm, and return what it said."""
    return subprocess.run(
        [os.environ.get("HELM", "helm"), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def render(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `helm template` with further options."""
    return run_helm(
        "template", name, str(CHART), "--kube-version", KUBERNETES, "--namespace", "relax",
        "--set", f"run.file={RUN_FILE}", *words,
    )  # fmt: skip


def main() -> None:
    """Write the rendered files."""
    RENDERED.mkdir(exist_ok=True)
    for name, values in find_values().items():
        done = render(name, "--values", str(values))
        if done.returncode:
            raise SystemExit(done.stderr)
        (RENDERED / f"{name}.yaml").write_text(done.stdout)


if __name__ == "__main__":
    main()
