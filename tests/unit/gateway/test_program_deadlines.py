"""Deadlines of a program count its own time, and say whose fault its lateness is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from relax_events.errors import EpisodeFailed, EpisodeLate
from relax_events.packages.gateway.chat_session import OwnClock
from relax_events.packages.gateway.program import ProgramLimits, wait_for_end

LIMITS = ProgramLimits(
    start_seconds=60.0,
    episode_seconds=0.01,
    idle_seconds=0.0,
    gone_seconds=0.0,
    memory_bytes=1,
)


class Program:
    """A program that has called the model and does not end; its clock is set by hand."""

    def __init__(self, *, num_turns: int) -> None:
        self.now = 0.0
        called = asyncio.Event()
        called.set()
        self.session: Any = SimpleNamespace(
            clock=OwnClock(lambda: self.now),
            first_call=called,
            graph=SimpleNamespace(nodes=[None] * num_turns),
        )
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, limits: ProgramLimits = LIMITS) -> None:
        await wait_for_end(self.ended, limits, self.session, who="it")


def test_time_in_which_calls_wait_for_the_policy_is_not_the_programs() -> None:
    async def run() -> None:
        program = Program(num_turns=1)
        clock = program.session.clock
        with clock.stopped():
            waiting = asyncio.ensure_future(program.wait())
            program.now = 100.0
            with clock.stopped():
                program.now = 200.0
            await asyncio.sleep(10 * LIMITS.episode_seconds)
            assert not waiting.done()
            assert clock.seconds == 0.0
        program.now += 0.02
        with pytest.raises(EpisodeLate, match=r"it took longer than 0.01 s \(environment.episode"):
            await waiting

    asyncio.run(run())


def test_program_that_ends_during_a_call_is_in_time() -> None:
    async def run() -> None:
        program = Program(num_turns=1)
        with program.session.clock.stopped():
            waiting = asyncio.ensure_future(program.wait())
            await asyncio.sleep(0)
            program.now = 100.0
            program.ended.set_result(None)
            await waiting

    asyncio.run(run())


def test_lateness_without_a_turn_of_the_policy_is_a_failed_attempt() -> None:
    async def run() -> None:
        program = Program(num_turns=0)
        program.session.clock = OwnClock()
        with pytest.raises(EpisodeFailed, match="it took longer"):
            await program.wait()

    asyncio.run(run())


IDLE = replace(LIMITS, episode_seconds=1000.0, idle_seconds=0.03)
REMOTE = replace(IDLE, gone_seconds=0.01)


@pytest.mark.parametrize(("num_turns", "error"), [(1, EpisodeLate), (0, EpisodeFailed)])
def test_silence_between_calls_ends_an_episode_and_a_call_ends_the_silence(
    num_turns: int, error: type[Exception]
) -> None:
    async def run() -> None:
        program = Program(num_turns=num_turns)
        clock = program.session.clock
        waiting = asyncio.ensure_future(program.wait(IDLE))
        program.now = 0.029
        with clock.stopped():
            program.now = 900.0
            await asyncio.sleep(2 * IDLE.idle_seconds)
            assert clock.idle_seconds == 0.0
        program.now += 0.029
        await asyncio.sleep(2 * IDLE.idle_seconds)
        assert not waiting.done()
        program.now += 0.002
        with pytest.raises(error, match=r"it made no call for 0.03 s \(environment.idle_seconds"):
            await waiting

    asyncio.run(run())


def test_program_may_be_silent_without_an_idle_deadline() -> None:
    async def run() -> None:
        program = Program(num_turns=1)
        waiting = asyncio.ensure_future(program.wait(replace(IDLE, idle_seconds=0.0)))
        await _cut_off(program)
        program.now += 999.0
        await asyncio.sleep(2 * IDLE.idle_seconds)
        assert not waiting.done()
        program.ended.set_result(None)
        await waiting

    asyncio.run(run())


@pytest.mark.parametrize("num_turns", [0, 2])
def test_harness_whose_connection_closed_during_a_call_is_gone_unless_it_calls_again(
    num_turns: int,
) -> None:
    async def run() -> None:
        program = Program(num_turns=num_turns)
        waiting = asyncio.ensure_future(program.wait(REMOTE))
        await _cut_off(program)
        with program.session.clock.stopped():
            await asyncio.sleep(0)
        program.now += 0.02
        await asyncio.sleep(2 * IDLE.idle_seconds)
        assert not waiting.done(), "it has called again, and may be silent for longer"
        await _cut_off(program)
        program.now += 0.011
        with pytest.raises(EpisodeFailed, match="closed its connection during a call"):
            await waiting

    asyncio.run(run())


def test_harness_with_another_call_under_way_is_not_gone() -> None:
    async def run() -> None:
        program = Program(num_turns=1)
        waiting = asyncio.ensure_future(program.wait(REMOTE))
        with program.session.clock.stopped():
            await _cut_off(program)
            program.now += 100.0
            await asyncio.sleep(2 * IDLE.idle_seconds)
        await asyncio.sleep(2 * IDLE.idle_seconds)
        assert not waiting.done()
        program.ended.set_result(None)
        await waiting

    asyncio.run(run())


async def _cut_off(program: Program) -> None:
    """Have a client disconnect during a call, which cancels the call."""

    async def call() -> None:
        with program.session.clock.stopped():
            await asyncio.Event().wait()

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
