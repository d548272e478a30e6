"""Answers are computed once for each state, and news wakes those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest
from event_samples import rolled_out

from relax_events.packages.dashboard import answers as answers_module
from relax_events.packages.dashboard.answers import MAX_ANSWERS, Answer, Answers, Bell, Remembered
from relax_events.packages.dashboard.recent_texts import EXCERPT, MAX_TEXTS, RecentTexts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock of answers; the function sets it."""
    now = [1000.0]
    monkeypatch.setattr(answers_module.time, "monotonic", lambda: now[0])

    def set_now(seconds: float) -> None:
        now[0] = seconds

    return set_now


def test_answer_is_computed_once_for_each_question_and_state(
    clock: Callable[[float], None],
) -> None:
    revision, computed = [1], list[str]()
    kept = Answers(lambda: revision[0])

    def ask(question: str) -> Answer:
        return kept.get(question, lambda: computed.append(question) or {"revision": revision[0]})

    first = ask("fleet")
    assert ask("fleet") is first
    ask("lag")
    assert computed == ["fleet", "lag"]
    revision[0] = 2
    second = ask("fleet")
    assert orjson.loads(second.body) == {"revision": 2}
    assert second.tag != first.tag
    clock(1000.0 + answers_module.CLOCK_SECONDS)
    assert ask("fleet").tag == second.tag, "the same answer has the same tag"
    assert computed == ["fleet", "lag", "fleet", "fleet"]


def test_answer_is_not_older_than_what_came_while_the_one_before_was_computed() -> None:
    revision = [1]
    kept = Answers(lambda: revision[0])

    def compute_slowly() -> int:
        found = revision[0]
        revision[0] += 1  # the reader reads more meanwhile
        return found

    assert kept.get("a", compute_slowly).body == b"1"
    assert kept.get("a", lambda: revision[0]).body == b"2"


def test_answers_are_bounded(clock: Callable[[float], None]) -> None:
    kept, computed = Answers(lambda: 1), list[int]()
    for number in [*range(MAX_ANSWERS + 1), MAX_ANSWERS, 0]:
        kept.get(str(number), lambda number=number: computed.append(number))  # type: ignore[misc]
    assert computed == [*range(MAX_ANSWERS + 1), 0]


def test_value_is_read_again_the_more_rarely_the_longer_reading_takes() -> None:
    now, reads, took = [0.0], [0], [0.1]

    def read() -> int:
        now[0] += took[0]
        reads[0] += 1
        return reads[0]

    value = Remembered(read, seconds=5.0, clock=lambda: now[0])
    assert (value.get(), value.get()) == (1, 1)
    now[0] = 5.0
    assert value.get() == 1
    now[0], took[0] = 5.2, 2.0
    assert value.get() == 2
    now[0] = 7.2 + 39.0  # twenty times two seconds are not over
    assert value.get() == 2
    now[0] = 7.2 + 41.0
    assert value.get() == 3
    value.forget()
    assert value.get() == 4


def test_bell_wakes_all_that_wait_and_none_that_missed_a_ring() -> None:
    async def listen() -> list[bool]:
        bell = Bell()
        bell.ring()
        await bell.wait(num_heard=0, timeout_seconds=60)  # it was rung before: no wait
        waiting = [
            asyncio.create_task(bell.wait(num_heard=1, timeout_seconds=60)) for _ in range(2)
        ]
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        bell.ring()
        await asyncio.gather(*waiting)
        await bell.wait(num_heard=2, timeout_seconds=0.001)
        return [one.done() for one in waiting]

    assert asyncio.run(listen()) == [True, True]


def test_newest_texts_are_kept_and_cut() -> None:
    texts = RecentTexts()
    long = "x" * (EXCERPT + 9)
    for row in range(MAX_TEXTS + 1):
        texts.add(row, rolled_out("000000-0000-0", 0, completion=long if row == 5 else "short"))
    assert texts.find([0, 5, MAX_TEXTS, MAX_TEXTS + 1]).keys() == {5, MAX_TEXTS}
    assert texts.find([5])[5]["completion"] == "x" * EXCERPT + "…"
