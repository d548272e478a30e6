"""The cache that the workers of one machine share."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from relax_events.attacks.stores import BEFORE_READING
from relax_events.media.host_cache import HostCache


def never() -> bytes:
    raise AssertionError("it was made again")


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if path.parent.name != "locks"]


def test_cached_value_is_computed_once_for_all_users_of_the_folder(tmp_path: Path) -> None:
    assert HostCache(tmp_path, max_bytes=1000).get("ab1", lambda: b"made") == b"made"
    other = HostCache(tmp_path, max_bytes=1000)
    assert other.contains("ab1")
    assert other.get("ab1", never) == b"made"
    assert not other.contains("ab2")


def test_concurrent_requests_for_a_key_wait_for_one_computation(tmp_path: Path) -> None:
    ready, made = Barrier(4), []

    def want(_: int) -> bytes:
        ready.wait(10)
        return HostCache(tmp_path, max_bytes=1000).get("ab1", lambda: made.append(1) or b"made")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(want, range(4))) == [b"made"] * 4
    assert made == [1]


def test_failed_computation_is_not_cached(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    cache = HostCache(tmp_path, max_bytes=1000)
    with pytest.raises(ValueError, match="no"):
        cache.get("ab1", fail)
    assert cache.get("ab1", lambda: b"made") == b"made"


@pytest.mark.parametrize("damage", [b"", b"short", bytes(36)])
def test_truncated_or_altered_cache_file_is_recomputed(tmp_path: Path, damage: bytes) -> None:
    cache = HostCache(tmp_path, max_bytes=1000)
    cache.get("ab1", lambda: b"made")
    files_in(tmp_path)[0].write_bytes(damage)
    assert cache.get("ab1", lambda: b"again") == b"again"
    assert cache.get("ab1", never) == b"again"


def test_cache_stays_within_its_size_limit_and_keeps_most_recently_read(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, max_bytes=10_000)
    for number in range(40):
        cache.get(f"{number:02}", lambda: bytes(968))  # 1000 with its digest
        cache.get("00", lambda: bytes(968))
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 10_000
    assert cache.contains("00")
    assert cache.contains("39")
    assert not cache.contains("10")


def test_lock_of_a_dead_worker_is_released(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, max_bytes=1000)
    process = multiprocessing.get_context("fork").Process(
        target=cache.get, args=("ab1", lambda: os._exit(3))
    )
    process.start()
    process.join(20)
    assert process.exitcode == 3
    assert cache.get("ab1", lambda: b"made") == b"made"


@pytest.mark.parametrize("attack", ["a link to the same bytes", "a pipe without a writer"])
def test_cache_file_that_is_no_regular_file_is_made_again(tmp_path: Path, attack: str) -> None:
    cache = HostCache(tmp_path / "cache", max_bytes=1000)
    cache.get("ab1", lambda: b"made")
    path = tmp_path / "cache" / "ab" / "ab1"
    BEFORE_READING[attack](path)
    assert cache.get("ab1", lambda: b"again") == b"again"
    assert not path.is_symlink()
    assert cache.get("ab1", never) == b"again"


def test_cache_is_closed_to_other_accounts(tmp_path: Path) -> None:
    HostCache(tmp_path / "cache", max_bytes=1000).get("ab1", lambda: b"made")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    (file,) = files_in(tmp_path / "cache")
    assert file.stat().st_mode & 0o777 == 0o600
