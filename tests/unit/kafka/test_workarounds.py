"""Each workaround names its bug and the version that has it; an upgrade asks whether it is still
needed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import confluent_kafka
import pytest

from relax_events.kafka.embedded.jars import read_jar_lock

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path
    for path in (ROOT / "relax_events/kafka/workarounds").glob("*.py")
    if path.name != "__init__.py"
)
VERSIONS = {
    "confluent-kafka": confluent_kafka.version(),
    "librdkafka": confluent_kafka.libversion()[0],
    "Kafka": read_jar_lock().kafka_version,
}
SEEN = re.compile(
    r"^Seen with: (confluent-kafka|librdkafka|Kafka) (\d+\.\d+\.\d+)[ .]", re.MULTILINE
)
REPORT = re.compile(r"Report: (none|KAFKA-\d+|https://github\.com/\S+/\d+)\.$", re.MULTILINE)
PROVED = re.compile(r"^Test: (test_\w+)\.$", re.MULTILINE)


def read_docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_workaround_is_for_a_bug_of_the_pinned_version(path: Path) -> None:
    docstring = read_docstring(path)
    seen = SEEN.search(docstring)
    assert seen, f"{path.name} needs a line 'Seen with: LIBRARY VERSION.'"
    library, version = seen.groups()
    assert version == VERSIONS[library], (
        f"{library} is now {VERSIONS[library]}: check whether {path.name} is still needed, then "
        f"delete it, or write the new version into its first lines"
    )
    assert REPORT.search(docstring), f"{path.name} needs 'Report: ' with a link, an id or 'none'"


def test_tests_that_workarounds_name_exist() -> None:
    names = {name for path in FILES for name in PROVED.findall(read_docstring(path))}
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert names
    assert not [name for name in names if f"def {name}(" not in text]
