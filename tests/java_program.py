"""Compiles and runs the Java programs of the tests on any Java runtime: the compiler is a pinned
jar too, so no JDK is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from relax_events.kafka.embedded.jars import (
    Jar,
    ensure_files,
    ensure_jars,
    locate_cache,
    read_jar_lock,
)
from relax_events.kafka.embedded.java import find_java

FOLDER = Path(__file__).parent / "java"
QUICK = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
COMPILE_SECONDS = 100


class JavaProgram:
    """A compiled single-file program."""

    def __init__(self, name: str, classes: Path) -> None:
        """Compile `java/<name>.java` into a folder, against the broker's own client and Apache's
        Avro."""
        self._name, self._classes, self._java = name, classes, str(find_java().executable)
        rows = json.loads((FOLDER / "java.lock.json").read_text())
        cache = locate_cache(read_jar_lock())
        self._avro, compiler = ensure_files(
            [Jar(**row) for row in rows],
            cache.parent / "java",
            title="Apache Avro and a Java compiler",
        )
        self._kafka = ensure_jars(read_jar_lock(), cache)
        source = FOLDER / f"{name}.java"
        command = [
            self._java,
            *QUICK,
            "-jar",
            str(compiler),
            "-source",
            "17",
            "-target",
            "17",
            "-proc:none",
            "-cp",
            self.class_path,
        ]
        subprocess.run(
            [*command, "-d", str(classes), str(source)], check=True, timeout=COMPILE_SECONDS
        )

    @property
    def class_path(self) -> str:
        """The client, Avro and what they need."""
        return os.pathsep.join(map(str, [self._avro, *self._kafka, self._classes]))

    def start(self, *arguments: str | int) -> subprocess.Popen[str]:
        """Start the program; its output can be read as text."""
        command = [self._java, *QUICK, "-cp", self.class_path, self._name, *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
