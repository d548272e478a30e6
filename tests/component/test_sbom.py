"""The bill of materials names everything that is pinned: by the tool that `make sbom` installs, or
a fake of it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_events.kafka.embedded.jars import read_jar_lock
from tests.stack.container_engine import StackError
from tests.stack.sbom import bill, pinned, write

ROOT = Path(__file__).parents[2]
TOOL = ROOT / ".venv-sbom" / "bin" / "cyclonedx-py"
STAND_IN = f"""#!{sys.executable}
import json, re, sys
pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\\]+)", sys.stdin.read(), re.MULTILINE)
found = [dict(name=name, version=version, purl=f"pkg:pypi/{{name}}@{{version}}", type="library", description="a line") for name, version in pins]
print(json.dumps(dict(bomFormat="CycloneDX", specVersion="1.6", components=found)))
"""


@pytest.fixture(params=["stand-in", "cyclonedx-py"])
def tool(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "cyclonedx-py":
        if not TOOL.exists():
            pytest.skip("cyclonedx-py is not installed; run `make sbom`")
        return TOOL
    (tmp_path / "tool").write_text(STAND_IN)
    (tmp_path / "tool").chmod(0o755)
    return tmp_path / "tool"


def test_sbom_lists_every_pinned_package_once_and_every_jar(tool: Path, tmp_path: Path) -> None:
    write(tool, tmp_path / "sbom.json")
    made = json.loads((tmp_path / "sbom.json").read_text())
    named = [one["purl"] for one in made["components"]]
    assert len(named) == len(set(named))
    lines = [
        line
        for file in (ROOT / "requirements").glob("*.txt")
        for line in file.read_text().splitlines()
    ]
    wanted = {match[1].lower() for line in lines if (match := re.match(r"(\S+==[^\s;\\]+)", line))}
    assert len(wanted) > 300
    assert {
        purl.removeprefix("pkg:pypi/").replace("@", "==").lower()
        for purl in named
        if purl.startswith("pkg:pypi/")
    } == wanted
    jars = {
        one["hashes"][0]["content"]
        for one in made["components"]
        if one["purl"].startswith("pkg:maven/")
    }
    assert jars == {jar.sha256 for jar in read_jar_lock().jars}
    assert made["bomFormat"] == "CycloneDX"


def test_sbom_names_jars_by_maven_coordinates() -> None:
    jar = next(jar for jar in read_jar_lock().jars if jar.path.endswith("lz4-java-1.10.2.jar"))
    (component,) = bill({"components": []}, {}, [jar])["components"]
    assert component["purl"] == "pkg:maven/at.yawk.lz4/lz4-java@1.10.2"


def test_error_names_pinned_package_missing_from_the_sbom() -> None:
    read: dict[str, Any] = {"components": [{"name": "a", "version": "1", "purl": "pkg:pypi/a@1"}]}
    pins = {("a", "1"): ["light"], ("b", "2"): ["light", "cpu"]}
    with pytest.raises(
        StackError, match=r"^cyclonedx-py read nothing of b==2: 1 of 2 pinned packages"
    ):
        bill(read, pins, [])
    package = bill(read, {("a", "1"): ["light"]}, [])["components"][0]
    assert package["properties"] == [{"name": "relax-events:requirements", "value": "light"}]
    assert "torch" in {name for name, _ in pinned()}
