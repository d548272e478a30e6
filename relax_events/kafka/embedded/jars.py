"""Downloads the jars of the embedded broker into a cache.

The lock file lists path, size and SHA-256 of each jar. Eight threads download, verify, and rename
complete files into place. Progress appears on stderr: a bar on a terminal, a few lines in a log.
"""

import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.kafka.embedded.storage import require_free_space


@dataclass(frozen=True)
class Jar:
    """One artifact, by its path inside any Maven repository."""

    path: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """File name without folders."""
        return self.path.rsplit("/", 1)[1]


@dataclass(frozen=True)
class JarLock:
    """All jars of one Kafka version, in class path order."""

    kafka_version: str
    jars: tuple[Jar, ...]

    @property
    def size_bytes(self) -> int:
        """Sum of all jars."""
        return sum(jar.size_bytes for jar in self.jars)


@cache
def read_jar_lock() -> JarLock:
    """Return the shipped lock file.

    It lists the runtime dependencies of `kafka_2.13` plus `slf4j-simple`, without the twelve jars
    that a plaintext or TLS broker never loads (reflection, OAuth tokens, command-line parsers, YAML
    and CSV). `hash4j` looks unused but is required by KIP-848 groups.
    """
    document = json.loads(
        resources.files(__package__).joinpath("kafka.lock.json").read_text(encoding="utf-8")
    )
    return JarLock(document["kafka_version"], tuple(Jar(**row) for row in document["jars"]))


def locate_cache(lock: JarLock) -> Path:
    """Return the user's cache folder of this Kafka version; it may not exist yet.

    Source: XDG Base Directory Specification, `XDG_CACHE_HOME`; a relative value there is to be
    ignored.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "relax-events" / f"kafka-{lock.kafka_version}"


_MIB = 1 << 20
_PLAIN_STEP = 0.25


@contextmanager
def show_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a download during the block.

    Args:
        title: What is downloaded.
        total_bytes: The total size.
    Returns:
        A thread-safe function that takes the number of received bytes; negative when a failed part
        restarts.
    """
    if sys.stderr.isatty():
        with _show_progress_bar(title, total_bytes) as advance:
            yield advance
    else:
        lines = _ProgressLines(title, total_bytes)
        yield lines.advance


@contextmanager
def _show_progress_bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    # this import takes 0.1 s, which only a download on a terminal pays
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("fetching {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda num_bytes: progress.update(task, advance=num_bytes)


class _ProgressLines:
    """Prints one line at the start and one for each received quarter."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total_bytes = total_bytes
        self._arrived_bytes = 0
        self._next_ratio = _PLAIN_STEP
        self._lock = threading.Lock()
        print(f"fetching {title}, {total_bytes / _MIB:.1f} MiB", file=sys.stderr, flush=True)

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived_bytes += num_bytes
            ratio = self._arrived_bytes / self._total_bytes
            if ratio >= self._next_ratio:
                print(f"fetched {ratio:.0%} of {self._title}", file=sys.stderr, flush=True)
                self._next_ratio = (ratio // _PLAIN_STEP + 1) * _PLAIN_STEP


REPOSITORY_VARIABLE = "RELAX_MAVEN_REPOSITORY"
MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
_NUM_THREADS = 8
_NUM_ATTEMPTS = 3
_CHUNK_BYTES = 1 << 18
_TIMEOUT_SECONDS = 30.0
# A dynamic class archive records each jar's modification time. A constant time keeps the archive
# valid when a jar is downloaded again.
_MODIFICATION_TIME_SECONDS = 1_000_000_000


def read_repository_address() -> str:
    """Return the address of the artifact repository, without a trailing slash.

    Raises:
        ConfigError: `RELAX_MAVEN_REPOSITORY` is neither an http(s) nor a file address.
    """
    address = os.environ.get(REPOSITORY_VARIABLE, MAVEN_CENTRAL)
    if urlsplit(address).scheme not in {"http", "https", "file"}:
        raise ConfigError(
            f"{REPOSITORY_VARIABLE} must start with http://, https:// or file://, got "
            f"{_without_login(address)!r}"
        )
    return address.rstrip("/")


def ensure_jars(lock: JarLock, directory: Path) -> list[Path]:
    """Download missing jars into `directory` and return all paths in class path order; see
    `ensure_files`.
    """
    return ensure_files(lock.jars, directory, title=f"Apache Kafka {lock.kafka_version}")


def ensure_files(jars: Sequence[Jar], directory: Path, *, title: str) -> list[Path]:
    """Download missing files of an artifact repository into `directory` and return all paths in the
    same order.

    Files with the right size and SHA-256 are not downloaded again, so a complete cache needs no
    network.

    Args:
        jars: The required files: jars, or other archives.
        directory: The cache folder; created when missing.
        title: A name for all files together, for the progress.
    Raises:
        EnvironmentProblem: A file could not be downloaded, or does not match the lock file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        whole = list(threads.map(lambda jar: _is_complete(directory / jar.name, jar), jars))
    missing = [jar for jar, good in zip(jars, whole, strict=True) if not good]
    if missing:
        total_bytes = sum(jar.size_bytes for jar in missing)
        require_free_space(directory, minimum_bytes=2 * total_bytes)
        with show_progress(f"{title}, {len(missing)} files", total_bytes) as advance:
            _fetch_all(missing, read_repository_address(), directory, advance)
    return [directory / jar.name for jar in jars]


def _fetch_all(
    jars: Sequence[Jar], address: str, directory: Path, advance: Callable[[int], None]
) -> None:
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        fetches = [threads.submit(_fetch, jar, address, directory, advance) for jar in jars]
        try:
            for fetch in as_completed(fetches):
                fetch.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # one failure ends all downloads


def _is_complete(path: Path, jar: Jar) -> bool:
    try:
        if path.stat().st_size != jar.size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == jar.sha256
    except FileNotFoundError:
        return False


def _fetch(jar: Jar, address: str, directory: Path, advance: Callable[[int], None]) -> None:
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            _fetch_once(jar, address, directory, advance)
        except (OSError, HTTPException) as error:
            permanent = False
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # frees its connection
                permanent = error.code < 500
            if permanent or attempt == _NUM_ATTEMPTS:
                raise _fetch_problem(jar, address, directory, error) from error
            time.sleep(attempt)
        else:
            return


def _fetch_once(jar: Jar, address: str, directory: Path, advance: Callable[[int], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".fetch-")
    received_bytes = 0
    digest = hashlib.sha256()
    try:
        source = f"{address}/{jar.path}"
        with (
            open(descriptor, "wb") as file,
            urllib.request.urlopen(source, timeout=_TIMEOUT_SECONDS) as answer,  # noqa: S310 file:// is fine
        ):
            while received_bytes <= jar.size_bytes and (chunk := answer.read(_CHUNK_BYTES)):
                file.write(chunk)
                digest.update(chunk)
                received_bytes += len(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        _check(jar, address, received_bytes, digest.hexdigest())
        os.utime(temporary, (_MODIFICATION_TIME_SECONDS, _MODIFICATION_TIME_SECONDS))
        os.replace(temporary, directory / jar.name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        advance(-received_bytes)
        raise


def _check(jar: Jar, address: str, received_bytes: int, sha256: str) -> None:
    if received_bytes < jar.size_bytes:
        raise OSError(f"the transfer ended after {received_bytes} of {jar.size_bytes} bytes")
    if sha256 != jar.sha256:
        raise EnvironmentProblem(
            f"checksum of {jar.path} from {_without_login(address)} differs: expected sha256 "
            f"{jar.sha256}, got {sha256}; "
            f"nothing was kept. Point {REPOSITORY_VARIABLE} at a repository that serves the "
            "published artifact"
        )


def _fetch_problem(jar: Jar, address: str, directory: Path, error: Exception) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"could not fetch {jar.path} from {_without_login(address)}: {error}. The embedded "
        "broker needs its jars once: "
        f"set {REPOSITORY_VARIABLE} to a Maven repository that this machine reaches "
        "(http(s):// or file://), "
        f"or copy the jars from another machine into {directory}"
    )


def _without_login(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
