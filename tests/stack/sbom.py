"""Write the software bill of materials as CycloneDX JSON: every package pinned in requirements/,
and every jar of the broker.

python -m tests.stack.sbom TOOL FILE        TOOL is cyclonedx-py, which reads the requirements; `make sbom` installs it in an environment of its own
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_events.kafka.embedded.jars import Jar, read_jar_lock
from tests.stack.container_engine import ROOT, StackError, exit_code_of

REQUIREMENTS = ROOT / "requirements"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
OF_FILES = "relax-events:requirements"
"""Property of a package: the files of requirements/ that pin it, so the environments and images
that contain it."""
TOOL_SECONDS = 120


def pinned(folder: Path = REQUIREMENTS) -> dict[tuple[str, str], list[str]]:
    """Return the requirements files that pin each package, by name and version."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(folder.glob("*.txt")):
        for name, version in PIN.findall(file.read_text()):
            found.setdefault((name, version), []).append(file.stem)
    return found


def bill(
    read: Mapping[str, Any], pins: Mapping[tuple[str, str], list[str]], jars: Iterable[Jar]
) -> dict[str, Any]:
    """Return the bill of materials.

    Args:
        read: Output of cyclonedx-py for all requirements files; a package in several files occurs
            several times. pins: Files by package. jars: Jars of the broker. Raises: StackError: A
            pinned package is missing in the output.
    """
    by_package = {
        (one["name"], one["version"]): one for one in read["components"] if "version" in one
    }
    if missing := sorted(f"{name}=={version}" for name, version in pins.keys() - by_package.keys()):
        raise StackError(
            f"cyclonedx-py read nothing of {', '.join(missing[:5])}: {len(missing)} of "
            f"{len(pins)} pinned packages; look at its output"
        )
    packages = [_package(by_package[key], files) for key, files in sorted(pins.items())]
    components = [*packages, *(_jar(jar) for jar in jars)]
    return {
        **read,
        "components": components,
        "dependencies": [{"ref": one["bom-ref"]} for one in components],
    }


def _package(component: Mapping[str, Any], files: list[str]) -> dict[str, Any]:
    kept = {
        key: value for key, value in component.items() if key != "description"
    }  # the line of the requirements file, hashes and all
    return {
        **kept,
        "bom-ref": component["purl"],
        "properties": [{"name": OF_FILES, "value": ",".join(files)}],
    }


def _jar(jar: Jar) -> dict[str, Any]:
    group, artifact, version = jar.path.rsplit("/", 3)[:3]
    purl = f"pkg:maven/{group.replace('/', '.')}/{artifact}@{version}"
    named = {"group": group.replace("/", "."), "name": artifact, "version": version}
    return {
        "type": "library",
        "bom-ref": purl,
        "purl": purl,
        **named,
        "hashes": [{"alg": "SHA-256", "content": jar.sha256}],
    }


def write(tool: Path, file: Path) -> None:
    """Read the requirements by cyclonedx-py, and write the bill of materials.

    Raises:
        StackError: The tool failed, or left a package out.
    """
    text = "\n".join(one.read_text() for one in sorted(REQUIREMENTS.glob("*.txt")))
    command = [
        str(tool),
        "requirements",
        "-",
        "--output-format",
        "JSON",
        "--output-reproducible",
        "--no-validate",
    ]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=TOOL_SECONDS
    )
    if done.returncode:
        raise StackError(f"{tool}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    made = bill(json.loads(done.stdout), pinned(), read_jar_lock().jars)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{file}: {len(made['components'])} components")


def main() -> int:
    """Write the file that the command line names."""
    tool, file = sys.argv[1:3]
    return exit_code_of(lambda: write(Path(tool), Path(file)))


if __name__ == "__main__":
    sys.exit(main())
