"""Fetch the locked jars into the cache: eight threads, every byte checked, every file renamed into place whole."""

import hashlib
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from relax_events.broker.embedded.lock import Jar, Lock
from relax_events.broker.embedded.progress import transfer_progress
from relax_events.broker.embedded.storage import require_free_space
from relax_events.errors import ConfigError, EnvironmentProblem

REPOSITORY_VARIABLE = "RELAX_MAVEN_REPOSITORY"
_NUM_THREADS = 8
_NUM_ATTEMPTS = 3
_CHUNK_BYTES = 1 << 18
_TIMEOUT_SECONDS = 30.0
# A dynamic class archive remembers each jar's modification time; a constant one keeps it valid when a jar has to be fetched again.
_MODIFICATION_TIME_SECONDS = 1_000_000_000


def repository_address() -> str:
    """Return the artifact repository to fetch from, without a trailing slash.

    Raises:
        ConfigError: `RELAX_MAVEN_REPOSITORY` is neither an http(s) nor a file address.
    """
    address = os.environ.get(REPOSITORY_VARIABLE)
    if address is None:
        from jgo.constants import MAVEN_CENTRAL_URL  # jgo knows the public address; importing it costs time that only a fetch should pay

        return str(MAVEN_CENTRAL_URL).rstrip("/")
    if urlsplit(address).scheme not in {"http", "https", "file"}:
        raise ConfigError(f"{REPOSITORY_VARIABLE} must start with http://, https:// or file://, got {_without_login(address)!r}")
    return address.rstrip("/")


def ensure_jars(lock: Lock, directory: Path) -> list[Path]:
    """Make every locked jar present in `directory` and return their paths in class path order, as `ensure_files` does."""
    return ensure_files(lock.jars, directory, title=f"Apache Kafka {lock.kafka_version}")


def ensure_files(jars: Sequence[Jar], directory: Path, *, title: str) -> list[Path]:
    """Make files of an artifact repository present in `directory` and return their paths in the same order.

    Files that are there with the right size and SHA-256 are not fetched again, so a filled cache needs no network.

    Args:
        jars: What must be there: jars, or archives of another kind.
        directory: The cache folder; made when missing.
        title: What they are together, for the progress shown.
    Raises:
        EnvironmentProblem: A file could not be fetched, or what came is not what the lock names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        whole = list(threads.map(lambda jar: _is_whole(directory / jar.name, jar), jars))
    missing = [jar for jar, good in zip(jars, whole, strict=True) if not good]
    if missing:
        total_bytes = sum(jar.size_bytes for jar in missing)
        require_free_space(directory, minimum_bytes=2 * total_bytes)
        with transfer_progress(f"{title}, {len(missing)} files", total_bytes) as advance:
            _fetch_all(missing, repository_address(), directory, advance)
    return [directory / jar.name for jar in jars]


def _fetch_all(jars: Sequence[Jar], address: str, directory: Path, advance: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        fetches = [threads.submit(_fetch, jar, address, directory, advance) for jar in jars]
        try:
            for fetch in as_completed(fetches):
                fetch.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # one jar that can't be had is enough to know


def _is_whole(path: Path, jar: Jar) -> bool:
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
                error.close()  # it holds the connection
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
        with open(descriptor, "wb") as file, urllib.request.urlopen(source, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 a file:// copy is fine
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
            f"checksum of {jar.path} from {_without_login(address)} differs: expected sha256 {jar.sha256}, got {sha256}; "
            f"nothing was kept. Point {REPOSITORY_VARIABLE} at a repository that serves the published artifact"
        )


def _fetch_problem(jar: Jar, address: str, directory: Path, error: Exception) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"could not fetch {jar.path} from {_without_login(address)}: {error}. The embedded broker needs its jars once: "
        f"set {REPOSITORY_VARIABLE} to a Maven repository that this machine reaches (http(s):// or file://), "
        f"or copy the jars from another machine into {directory}"
    )


def _without_login(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
