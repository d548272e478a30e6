"""Calls a function at each instant of some work, as a signal handler is called: in the same thread,
between two instructions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

SECONDS = 100.0


def interrupt_everywhere(
    prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> int:
    """Do the same work again and again, interrupted one instruction later each time; return how many
    instructions it has.

    Args:
        prepare: Returns the work, and what interrupts it.
    Raises:
        AssertionError: One of them does not end: the interruption waits for what it interrupts.
    """
    for number in count(1):
        work, interruption = prepare()
        tracer = _Tracer(number, interruption)
        thread = threading.Thread(target=tracer.run, args=(work,), daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert not thread.is_alive(), f"it hangs when it is interrupted at {tracer.place}"
        if not tracer.place:
            return number - 1
    raise AssertionError


class _Tracer:
    def __init__(self, number: int, interruption: Callable[[], object]) -> None:
        self._num_left, self._interruption = number, interruption
        self.place = ""

    def run(self, work: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.place:
            self._num_left -= 1
            if not self._num_left:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._interruption()
        return self._trace
