"""Deadlines of a program count its own time, and say whose fault its lateness is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax_events.errors import EpisodeFailed, EpisodeLate
from relax_events.packages.gateway.chat_session import OwnClock
from relax_events.packages.gateway.program import ProgramLimits, wait_for_end

LIMITS = ProgramLimits(start_seconds=60.0, episode_seconds=0.01, memory_bytes=1)


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

    async def wait(self) -> None:
        await wait_for_end(self.ended, LIMITS, self.session, who="it")


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
