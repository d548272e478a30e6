"""A resumed run ignores the commands of its earlier sessions."""

import os
import signal

from relax_events.events.parts import Command, Outcome
from relax_events.events.types import PromptGroupEnded, RunCommanded
from relax_events.projections.run_state import RunState
from relax_events.runtime.control_follower import drop_superseded
from relax_events.runtime.drain import Drain


def command(kind: Command, at: int = 0) -> RunCommanded:
    return RunCommanded(command=kind, reason="test", commanded_at=at)


def failure(index: int, at: int) -> PromptGroupEnded:
    return PromptGroupEnded(
        prompt_group_id=f"000000-{index:04d}-0",
        train_step=0,
        group_index=index,
        attempt=0,
        row=index,
        outcome=Outcome.FAILED,
        reason="broken",
        policy_version=0,
        trainer_version=0,
        ended_at=at,
    )


def test_commands_before_a_resume_are_left_out():
    stop, resume, pause = command(Command.STOP), command(Command.RESUME), command(Command.PAUSE)
    other = failure(0, 1)
    assert drop_superseded([stop, other, resume, pause]) == [other, resume, pause]


def test_commands_stay_when_nothing_was_resumed():
    events = [command(Command.PAUSE), command(Command.STOP)]
    assert drop_superseded(events) == events


def test_state_is_not_ended_after_a_resume():
    state = RunState()
    state.apply(command(Command.STOP, at=5))
    assert state.ended is not None
    state.apply(command(Command.RESUME, at=6))
    assert state.ended is None


def test_failures_before_a_resume_do_not_count_as_consecutive_in_any_read_order():
    state = RunState()
    state.apply(failure(0, at=3))
    state.apply(command(Command.RESUME, at=10))
    state.apply(failure(1, at=4))
    state.apply(failure(2, at=11))
    assert (state.num_consecutive_failures, state.outcomes["failed"]) == (1, 3)


def test_first_signal_during_a_commanded_drain_does_not_end_the_process():
    drain = Drain(seconds=1.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    drain.listen_to_signals()
    try:
        drain.start()
        os.kill(
            os.getpid(), signal.SIGTERM
        )  # a second start of the drain would have ended this process
        assert drain.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
