"""Child processes that hang, die, lie and print: each costs the request that it ran."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Profile, Reply
from relax_events.confinement.entry_points import Door, EntryPoint
from relax_events.confinement.frames import FrameLimits
from relax_events.confinement.prints import BURST_BYTES
from relax_events.confinement.requests import Request, Result

POINT = EntryPoint("test", (Door.REPLY,), Profile.TRUSTED, "tests.component.pool_child")
MEMORY_BYTES = 4 * 1024**3
LONG_SECONDS = 250.0
SHORT_SECONDS, BLOCKED_SECONDS = 0.5, 2.0


@pytest.fixture
def pools() -> Iterator[list[ChildPool]]:
    opened: list[ChildPool] = []
    yield opened
    for pool in opened:
        pool.close()


def open_pool(
    pools: list[ChildPool], *, setup: dict[str, Any] | None = None, **settings: Any
) -> ChildPool:
    given = {"memory_bytes": MEMORY_BYTES, **(setup or {})}
    pools.append(ChildPool(ChildSettings(entry_point=POINT, setup=given, **settings)))
    return pools[-1]


def ask(pool: ChildPool, do: str, *, seconds: float = LONG_SECONDS, **head: Any) -> Future[Reply]:
    where = {name: head.pop(name) for name in ("slot", "child") if name in head}
    return pool.call({"do": do, **head}, seconds=seconds, **where)


def pid(reply: Reply) -> int:
    return int(reply.head["pid"])


def lost(future: Future[Reply]) -> ChildLost:
    with pytest.raises(ChildLost) as caught:
        future.result()
    return caught.value


def test_child_answers_with_the_contents_that_it_got_however_large(pools: list[ChildPool]) -> None:
    contents = [b"", b"a" * 10, os.urandom(3_000_000)]
    reply = (
        open_pool(pools)
        .call({"do": "echo", "text": "hällo"}, contents, seconds=LONG_SECONDS)
        .result()
    )
    assert (reply.head["said"], reply.contents) == ("hällo", contents)


def test_late_request_costs_itself_and_those_behind_it_are_repeated(pools: list[ChildPool]) -> None:
    pool = open_pool(pools)
    first = pid(ask(pool, "echo", text="").result())
    late = ask(pool, "wait", seconds=SHORT_SECONDS)
    behind = [ask(pool, "echo", text=str(number), seconds=LONG_SECONDS) for number in range(3)]
    error = lost(late)
    assert (error.kind, error.describe("the.key")) == ("late", "took longer than 0.5 s (the.key)")
    replies = [future.result() for future in behind]
    assert [reply.head["said"] for reply in replies] == ["0", "1", "2"]
    assert {pid(reply) for reply in replies} != {first}
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize(
    ("do", "kind", "text"),
    [
        ("exit", "died", "died (exit code 9)"),
        ("fail", "died", "died (ValueError: odd; exit code 1)"),
        ("bomb", "invalid", "sent a head of 2147483648 bytes, at most 67108864 may be"),
        ("noise", "invalid", "sent a head that is no JSON object with the lengths of its contents"),
        ("unasked", "invalid", "sent an answer to no request"),
    ],
)
def test_child_that_dies_or_breaks_the_protocol_costs_its_request(
    pools: list[ChildPool], do: str, kind: str, text: str
) -> None:
    pool = open_pool(pools)
    error = lost(ask(pool, do))
    assert (error.kind, error.describe("")) == (kind, text)
    assert ask(pool, "echo", text="again").result().head["said"] == "again"


def test_answer_before_a_broken_message_counts(pools: list[ChildPool]) -> None:
    """Both arrive together; the request that runs next is the one that the child is lost with."""
    pool = open_pool(pools)
    pool.start()
    first = ask(pool, "echo, then noise")
    assert first.result(60).head["said"] == "echo"
    assert ask(pool, "echo", text="again").result(60).head["said"] == "again"


def test_reply_beyond_the_bound_costs_its_request_alone(pools: list[ChildPool]) -> None:
    pool = open_pool(pools, limits=FrameLimits(head_bytes=100_000, content_bytes=100))
    assert lost(ask(pool, "echo", text="x" * 200_000)).kind == "invalid"
    large = pool.call({"do": "echo", "text": ""}, [b"x" * 101], seconds=LONG_SECONDS)
    assert lost(large).kind == "invalid"
    assert ask(pool, "echo", text="x" * 90_000).result().head["said"] == "x" * 90_000


def test_concurrent_child_that_is_lost_costs_the_culprit_alone(
    pools: list[ChildPool], tmp_path: Path
) -> None:
    pool, mark = open_pool(pools, setup={"concurrent": True}), tmp_path / "mark"
    held = ask(pool, "hold", unless=str(mark))
    ask(pool, "echo", text="").result()  # it was sent after the other one
    mark.touch()
    assert lost(ask(pool, "exit")).kind == "died"
    assert isinstance(held.result(), Reply)


def test_child_that_ticks_is_late_all_the_same(pools: list[ChildPool]) -> None:
    error = lost(ask(open_pool(pools), "tick", seconds=SHORT_SECONDS))
    assert error.kind == "late"


def test_silent_child_is_lost_before_its_deadline(pools: list[ChildPool]) -> None:
    pool = open_pool(pools, silent_seconds=SHORT_SECONDS)
    error = lost(ask(pool, "wait"))
    assert (error.kind, error.is_late) == ("silent", True)
    assert error.describe("") == "was silent for 0.5 s"


@pytest.mark.parametrize(
    ("numbers", "ticks", "kind"),
    [
        (["own"], False, "state_lost"),
        ([0, "own"], False, "state_lost"),
        (["own", 0], False, "late"),
        (["own"], True, "late"),
        ([[1], "1", None, 10_000], False, "late"),
    ],
)
def test_request_that_its_child_names_as_blocking_is_the_only_suspect(
    pools: list[ChildPool], tmp_path: Path, numbers: list[Any], ticks: bool, kind: str
) -> None:
    pool = open_pool(pools, keeps_state=True, setup={"concurrent": True})
    held = ask(pool, "hold", unless=str(tmp_path / "never"))
    ask(pool, "echo", text="").result()  # it was sent after the other one
    blocking = ask(pool, "block", numbers=numbers, ticks=ticks, seconds=BLOCKED_SECONDS)
    assert lost(blocking).kind == "late"
    assert lost(held).kind == kind


def test_child_that_reports_its_block_is_silent_all_the_same(pools: list[ChildPool]) -> None:
    pool = open_pool(pools, silent_seconds=SHORT_SECONDS, setup={"concurrent": True})
    assert lost(ask(pool, "block on")).kind == "silent"


def test_state_is_lost_with_its_process_and_never_moved_to_another(pools: list[ChildPool]) -> None:
    pool = open_pool(pools, keeps_state=True, size=2)
    begun = ask(pool, "echo", text="", slot=1).result()
    assert lost(ask(pool, "exit", slot=1)).kind == "died"
    neighbour = lost(ask(pool, "echo", text="", slot=1, child=begun.child))
    assert neighbour.kind == "state_lost"
    assert neighbour.describe("") == "was lost with a request of others"
    other = ask(pool, "echo", text="", slot=1).result()
    assert other.child != begun.child


@pytest.mark.parametrize("is_asked_later", [False, True])
def test_state_is_lost_also_behind_a_request_that_needs_none(
    pools: list[ChildPool], tmp_path: Path, is_asked_later: bool
) -> None:
    """A request of the state is behind one that waits for a new process, before or after its end."""
    pool = open_pool(pools, keeps_state=True, setup={"concurrent": True, "in_flight": 2})
    begun = ask(pool, "echo", text="", slot=0).result()
    held = ask(pool, "hold", unless=str(tmp_path / "never"), slot=0)
    ask(pool, "echo", text="", slot=0).result()  # it was sent after the other one
    ask(pool, "hold", unless=str(tmp_path / "never"), slot=0)
    new = ask(pool, "echo", text="new", slot=0)
    late = ask(pool, "echo", text="", slot=0, child=begun.child)
    os.kill(pid(begun), signal.SIGKILL)
    assert lost(held).kind == "died"
    if is_asked_later:
        late = ask(pool, "echo", text="", slot=0, child=begun.child)
    assert lost(late).kind == "state_lost"
    assert new.result().head["said"] == "new"


@pytest.mark.parametrize("do", ["exit", "wait", "bomb"])
def test_requests_behind_the_one_that_loses_a_state_say_so(pools: list[ChildPool], do: str) -> None:
    pool = open_pool(pools, keeps_state=True)
    state = ask(pool, "echo", text="", slot=0).result().child
    culprit = ask(pool, do, slot=0, child=state, seconds=SHORT_SECONDS)
    behind = [ask(pool, "echo", text="", slot=0, child=state) for _ in range(3)]
    assert lost(culprit).kind in ("died", "late", "invalid")
    assert [lost(future).kind for future in behind] == ["state_lost"] * 3


def test_child_that_asks_for_it_is_replaced(pools: list[ChildPool]) -> None:
    pool = open_pool(pools)
    first = ask(pool, "renew").result()
    assert pid(ask(pool, "echo", text="").result()) != pid(first)
    assert not psutil.pid_exists(pid(first))


@pytest.mark.parametrize(
    ("setup", "kind", "text"),
    [
        ({"refuse": 1}, "unloaded", "it does not like this"),
        ({"die": 1}, "died", "died (exit code 4) before it was loaded"),
        ({"hang": 1}, "late", "took longer than 5 s to load"),
    ],
)
def test_child_that_can_not_be_loaded_fails_all_that_wait_for_it(
    pools: list[ChildPool], setup: dict[str, Any], kind: str, text: str
) -> None:
    start_seconds = 5.0 if "hang" in setup else LONG_SECONDS
    pool = open_pool(pools, setup=setup, start_seconds=start_seconds)
    waiting = ask(pool, "echo", text="")
    with pytest.raises(ChildLost):
        pool.start()
    error = lost(waiting)
    assert (error.kind, error.was_loaded, error.describe("")) == (kind, False, text)


def test_all_children_must_say_the_same(pools: list[ChildPool]) -> None:
    pool = open_pool(pools, fixed_facts=("pid",), size=2)
    with pytest.raises(ChildLost) as caught:
        pool.start()
    assert caught.value.kind == "changed"


def test_closed_pool_fails_what_runs_and_waits(pools: list[ChildPool]) -> None:
    pool = open_pool(pools, setup={"in_flight": 1})
    (facts,) = pool.start()
    running, waiting = ask(pool, "wait"), ask(pool, "echo", text="")
    pool.close()
    assert {lost(running).kind, lost(waiting).kind, lost(ask(pool, "echo", text="")).kind} == {
        "closed"
    }
    assert not psutil.pid_exists(facts["pid"])


def test_children_end_with_a_pool_that_is_garbage() -> None:
    pool = ChildPool(ChildSettings(entry_point=POINT, setup={"memory_bytes": MEMORY_BYTES}))
    process = psutil.Process(pid(ask(pool, "echo", text="").result()))
    del pool
    gc.collect()
    process.wait(timeout=60)


def test_printed_bytes_are_bounded_and_never_taken_for_an_answer(
    pools: list[ChildPool], capfd: pytest.CaptureFixture[str]
) -> None:
    pool = open_pool(pools)
    for _ in range(3):
        ask(pool, "print", size=20 * BURST_BYTES).result()
    assert len(capfd.readouterr().err) < 2 * BURST_BYTES


def test_many_requests_are_answered_in_any_order_and_by_all_children(
    pools: list[ChildPool],
) -> None:
    pool = open_pool(pools, size=2, setup={"in_flight": 64})
    pool.start()
    done: SimpleQueue[Result] = SimpleQueue()
    texts = [str(number) for number in range(500)]
    pool.submit(
        [
            Request(head={"do": "echo", "text": text}, seconds=LONG_SECONDS, on_done=done.put)
            for text in texts
        ]
    )
    replies = [done.get() for _ in texts]
    assert sorted(reply.head["said"] for reply in replies if isinstance(reply, Reply)) == sorted(
        texts
    )
    assert len({pid(reply) for reply in replies if isinstance(reply, Reply)}) == 2


def test_child_is_killed_with_its_parent_also_while_it_computes(tmp_path: Path) -> None:
    """No code of the child runs at that moment: the kernel kills it."""
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(read_end)
        pool = ChildPool(ChildSettings(entry_point=POINT, setup={"memory_bytes": MEMORY_BYTES}))
        started = pool.start()[0]["pid"]
        ask(pool, "wait")
        os.write(write_end, str(started).encode())
        signal.pause()
    os.close(write_end)
    child = psutil.Process(int(os.read(read_end, 100)))
    os.close(read_end)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    child.wait(timeout=60)
