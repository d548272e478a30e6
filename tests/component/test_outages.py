"""An unavailable store is retried by callers that may wait, until their deadline; any response ends
the wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import EIO
from io import FileIO
from pathlib import Path

import pytest

from relax_events.errors import ObjectError, StoreUnavailable
from relax_events.objects import ObjectStore
from relax_events.objects import outages as outages_module
from relax_events.objects.outages import Outages

ROOT = "s3://bucket/"


class Clock:
    """A clock that the pauses turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.while_away: list[float] = []
        self.outages = Outages(clock=lambda: self.now)

    def pause(self, seconds: float) -> None:
        self.while_away.append(self.outages.seconds)
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def failing(times: int, error: Callable[[], Exception]) -> Callable[[], str]:
    """Make a call that fails so often before it answers."""
    left = iter(range(times))

    def call() -> str:
        if next(left, None) is not None:
            raise error()
        return "answer"

    return call


def away() -> StoreUnavailable:
    return StoreUnavailable("can't read s3://bucket/a: 503")


def test_store_call_is_retried_with_growing_pauses_until_it_succeeds(clock: Clock) -> None:
    clock.outages.start_waiting(deadline_seconds=3600, pause=clock.pause)
    assert clock.outages.call_until_available(ROOT, failing(12, away)) == "answer"
    assert len(clock.pauses) == 12
    longest = [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30]
    assert all(
        bound / 2 <= pause <= bound for pause, bound in zip(clock.pauses, longest, strict=True)
    )
    assert clock.while_away == pytest.approx([sum(clock.pauses[:index]) for index in range(12)])
    assert clock.outages.seconds == 0


def test_unavailable_store_raises_after_the_deadline(clock: Clock) -> None:
    clock.outages.start_waiting(deadline_seconds=100, pause=clock.pause)
    with pytest.raises(
        StoreUnavailable, match=r"503; waited for \d+ s of at most 100, so this worker ends"
    ) as caught:
        clock.outages.call_until_available(ROOT, failing(10**6, away))
    assert 70 <= sum(clock.pauses) <= 100
    assert caught.value.exit_code == 8


@pytest.mark.parametrize("is_disarmed", [False, True])
def test_store_call_does_not_wait_unless_waiting_is_enabled(
    clock: Clock, *, is_disarmed: bool
) -> None:
    if is_disarmed:
        clock.outages.start_waiting(deadline_seconds=100, pause=clock.pause)
        clock.outages.stop_waiting()
    with pytest.raises(StoreUnavailable, match=r"503$"):
        clock.outages.call_until_available(ROOT, failing(1, away))
    assert clock.pauses == []


def test_missing_object_error_is_not_retried(clock: Clock) -> None:
    clock.outages.start_waiting(deadline_seconds=100, pause=clock.pause)
    with pytest.raises(ObjectError, match="no such object"):
        clock.outages.call_until_available(
            ROOT, failing(1, lambda: ObjectError("there is no such object"))
        )
    assert clock.pauses == []
    assert clock.outages.seconds == 0


def test_error_raised_during_the_pause_ends_the_wait(clock: Clock) -> None:
    def pause(_: float) -> None:
        raise StoreUnavailable("the worker was asked to end")

    clock.outages.start_waiting(deadline_seconds=100, pause=pause)
    with pytest.raises(StoreUnavailable, match="asked to end"):
        clock.outages.call_until_available(ROOT, failing(1, away))


def test_missing_store_directory_is_an_outage_and_a_missing_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    store = ObjectStore.open((tmp_path / "objects").as_uri())
    reference = store.put(b"hello")
    (tmp_path / "objects").rename(tmp_path / "unmounted")
    with pytest.raises(
        StoreUnavailable, match="the store's directory is gone; mount or restore file://"
    ):
        store.get(reference)
    monkeypatch.setattr(
        outages_module.outages,
        "_pause",
        lambda _: (tmp_path / "unmounted").rename(tmp_path / "objects"),
    )
    monkeypatch.setattr(outages_module.outages, "_deadline_seconds", 3600.0)
    assert store.get(reference) == b"hello"
    store.delete([store.key(reference.uri)])
    with pytest.raises(ObjectError, match="there is no such object"):
        store.get(reference)


def test_unreadable_object_in_an_available_store_is_not_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    store.put_at("a", b"hello")

    class BrokenFile(FileIO):
        def read(self, size: int = -1) -> bytes:
            raise OSError(EIO, os.strerror(EIO))

    monkeypatch.setattr(
        "relax_events.objects.local_files.open_below", lambda folder, key: BrokenFile(folder / key)
    )
    with pytest.raises(ObjectError, match=r"can't read .*/a: .*Input/output error"):
        store.get_at("a")
