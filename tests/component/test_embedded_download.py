"""Fetching jars from a repository that is a folder or a small HTTP server of this test."""

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.kafka.embedded.jars import Jar, JarLock, ensure_jars, read_repository_address

CONTENTS = {
    f"org/example/part{index}/part{index}-1.jar": f"part {index} ".encode() * 1000
    for index in range(12)
}
LOCK = JarLock(
    "9.9.9",
    tuple(
        Jar(path, len(content), hashlib.sha256(content).hexdigest())
        for path, content in CONTENTS.items()
    ),
)


class Repository(ThreadingHTTPServer):
    """Serves `contents`; `failures` counts down the answers that are errors instead."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents = dict(CONTENTS)
        self.paths: list[str] = []
        self.failures: list[int] = []
        self.truncations = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        self.server.paths.append(path)
        if self.server.failures:
            self.send_error(self.server.failures.pop())
        elif path not in self.server.contents:
            self.send_error(404)
        else:
            self._send(self.server.contents[path])

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.truncations:
            self.server.truncations -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base class names it so
        """Keep the test's stderr for what the code under test prints."""


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with Repository() as server:
        monkeypatch.setenv("RELAX_MAVEN_REPOSITORY", server.address)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def test_ensure_jars_fetches_all_in_class_path_order_when_cache_is_empty(
    repository: Repository, tmp_path: Path
) -> None:
    paths = ensure_jars(LOCK, tmp_path / "cache")
    assert [path.name for path in paths] == [jar.name for jar in LOCK.jars]
    assert [path.read_bytes() for path in paths] == list(CONTENTS.values())
    assert sorted(repository.paths) == sorted(CONTENTS)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        jar.name for jar in LOCK.jars
    )


def test_ensure_jars_sends_no_request_when_cache_is_complete(
    repository: Repository, tmp_path: Path
) -> None:
    ensure_jars(LOCK, tmp_path)
    repository.paths.clear()
    ensure_jars(LOCK, tmp_path)
    assert repository.paths == []


@pytest.mark.parametrize("damage", [b"", b"x" * len(CONTENTS[LOCK.jars[3].path])])
def test_ensure_jars_fetches_again_when_a_jar_was_damaged(
    repository: Repository, tmp_path: Path, damage: bytes
) -> None:
    paths = ensure_jars(LOCK, tmp_path)
    time_before = paths[3].stat().st_mtime
    repository.paths.clear()
    paths[3].write_bytes(damage)
    ensure_jars(LOCK, tmp_path)
    assert repository.paths == [LOCK.jars[3].path]
    assert paths[3].read_bytes() == CONTENTS[LOCK.jars[3].path]
    assert paths[3].stat().st_mtime == time_before


def test_ensure_jars_retries_when_the_repository_fails_temporarily(
    repository: Repository, tmp_path: Path
) -> None:
    repository.failures = [503]
    repository.truncations = 1
    paths = ensure_jars(LOCK, tmp_path)
    assert [path.read_bytes() for path in paths] == list(CONTENTS.values())
    assert len(repository.paths) == len(CONTENTS) + 2


def test_ensure_jars_refuses_when_checksum_differs(repository: Repository, tmp_path: Path) -> None:
    bad = LOCK.jars[5]
    served = b"y" * bad.size_bytes
    repository.contents[bad.path] = served
    expected = (
        f"checksum of {bad.path} from .* differs: expected sha256 {bad.sha256}, got "
        f"{hashlib.sha256(served).hexdigest()}"
    )
    with pytest.raises(EnvironmentProblem, match=expected):
        ensure_jars(LOCK, tmp_path)
    assert not (tmp_path / bad.name).exists()
    assert not list(tmp_path.glob(".fetch-*"))


def test_ensure_jars_refuses_when_a_download_exceeds_its_locked_size(
    repository: Repository, tmp_path: Path
) -> None:
    repository.contents[LOCK.jars[0].path] += b"!"
    with pytest.raises(EnvironmentProblem, match="differs"):
        ensure_jars(LOCK, tmp_path)


def test_ensure_jars_names_jar_and_remedies_when_repository_lacks_it(
    repository: Repository, tmp_path: Path
) -> None:
    path = LOCK.jars[7].path
    del repository.contents[path]
    with pytest.raises(EnvironmentProblem) as caught:
        ensure_jars(LOCK, tmp_path)
    text = str(caught.value)
    assert f"could not fetch {path}" in text
    assert "404" in text
    assert "RELAX_MAVEN_REPOSITORY" in text
    assert str(tmp_path) in text
    assert repository.paths.count(path) == 1


def test_ensure_jars_names_jar_and_hides_login_when_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("RELAX_MAVEN_REPOSITORY", "http://user:secret@127.0.0.1:9/maven")
    with pytest.raises(EnvironmentProblem, match="could not fetch org/example/part") as caught:
        ensure_jars(LOCK, tmp_path)
    assert "secret" not in str(caught.value)


def test_ensure_jars_reads_a_folder_when_address_is_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    for path, content in CONTENTS.items():
        (mirror / path).parent.mkdir(parents=True)
        (mirror / path).write_bytes(content)
    monkeypatch.setenv("RELAX_MAVEN_REPOSITORY", mirror.as_uri() + "/")
    assert [path.read_bytes() for path in ensure_jars(LOCK, tmp_path / "cache")] == list(
        CONTENTS.values()
    )


def test_ensure_jars_shows_plain_progress_when_stderr_is_no_terminal(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure_jars(LOCK, tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("fetching Apache Kafka 9.9.9, 12 files, ")
    assert lines[-1] == "fetched 100% of Apache Kafka 9.9.9, 12 files"


def test_repository_address_refuses_when_scheme_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_MAVEN_REPOSITORY", "ftp://me:word@mirror/maven")
    with pytest.raises(
        ConfigError,
        match=(
            "RELAX_MAVEN_REPOSITORY must start with http://, https:// or file://, got "
            "'ftp://mirror/maven'"
        ),
    ):
        read_repository_address()


def test_repository_address_is_the_public_one_when_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RELAX_MAVEN_REPOSITORY", raising=False)
    assert read_repository_address() == "https://repo.maven.apache.org/maven2"
