"""What the workers of a machine share."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from relax_events.media.host_cache import HostCache


def never() -> bytes:
    raise AssertionError("it was made again")


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if path.parent.name != "locks"]


def test_thing_is_made_once_for_all_that_share_the_folder(tmp_path: Path) -> None:
    assert HostCache(tmp_path, max_bytes=1000).get("ab1", lambda: b"made") == b"made"
    other = HostCache(tmp_path, max_bytes=1000)
    assert other.contains("ab1")
    assert other.get("ab1", never) == b"made"
    assert not other.contains("ab2")


def test_workers_that_want_the_same_wait_for_the_one_that_makes_it(tmp_path: Path) -> None:
    ready, made = Barrier(4), []

    def want(_: int) -> bytes:
        ready.wait(10)
        return HostCache(tmp_path, max_bytes=1000).get("ab1", lambda: made.append(1) or b"made")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(want, range(4))) == [b"made"] * 4
    assert made == [1]


def test_what_fails_to_be_made_is_not_kept(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    cache = HostCache(tmp_path, max_bytes=1000)
    with pytest.raises(ValueError, match="no"):
        cache.get("ab1", fail)
    assert cache.get("ab1", lambda: b"made") == b"made"


@pytest.mark.parametrize("damage", [b"", b"short", bytes(36)])
def test_torn_or_altered_file_is_made_again(tmp_path: Path, damage: bytes) -> None:
    cache = HostCache(tmp_path, max_bytes=1000)
    cache.get("ab1", lambda: b"made")
    files_in(tmp_path)[0].write_bytes(damage)
    assert cache.get("ab1", lambda: b"again") == b"again"
    assert cache.get("ab1", never) == b"again"


def test_cache_stays_within_its_bound_and_keeps_what_was_read_last(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, max_bytes=10_000)
    for number in range(40):
        cache.get(f"{number:02}", lambda: bytes(968))  # 1000 with its digest
        cache.get("00", lambda: bytes(968))
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 10_000
    assert cache.contains("00")
    assert cache.contains("39")
    assert not cache.contains("10")


def test_lock_of_a_worker_that_died_is_free(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, max_bytes=1000)
    process = multiprocessing.get_context("fork").Process(
        target=cache.get, args=("ab1", lambda: os._exit(3))
    )
    process.start()
    process.join(20)
    assert process.exitcode == 3
    assert cache.get("ab1", lambda: b"made") == b"made"
