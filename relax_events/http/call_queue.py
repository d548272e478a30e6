"""Which call is next: each identity has a budget, and identities take turns.

    calls of A  A A A A A A  --.
    calls of B  B            --+--> A, B, C, A, C, A ... --> body is read and parsed --> answered
    calls of C  C C          --'

A call is in the budget of its identity until it is answered. Its body is in the server's budget
only until it is parsed, so that calls that wait for an engine hold up no others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from relax_events.http.identity import SMALL_BODY_BYTES, Identity

MAX_WAITING = 1024
"""Calls of one identity that wait for their turn."""
TOTAL_BYTES = 256 * 1024**2
"""Bodies that are being read or parsed, of all identities."""


class QueueFull(Exception):
    """An identity has as many waiting calls as it may have."""


@dataclass(slots=True, eq=False)
class Turn:
    """A call's share of the budgets.

    Attributes:
        identity: Whose call it is.
        num_bytes: Of its body, at most.
        return_bytes: Returns bytes to the server's budget.
        started: Done when it is the call's turn.
        holds_body: Whether its body is in the server's budget.
    """

    identity: Identity
    num_bytes: int
    return_bytes: Callable[[int], None]
    started: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    holds_body: bool = False

    @property
    def is_large(self) -> bool:
        """Whether its body needs a budget."""
        return self.num_bytes > SMALL_BODY_BYTES

    def release_body(self) -> None:
        """Return the share of the server's budget: the body is parsed."""
        if self.holds_body:
            self.holds_body = False
            self.return_bytes(self.num_bytes)


@dataclass(slots=True)
class _Budget:
    """The calls of an identity."""

    waiting: deque[Turn] = field(default_factory=deque)
    num_running: int = 0
    num_bytes: int = 0

    def find_next(self) -> Turn | None:
        """Return the next waiting call; None if no waiting call has room."""
        head = self.waiting[0] if self.waiting else None
        return head if head is not None and self._has_room(head) else self.find_small()

    def find_small(self) -> Turn | None:
        """Return the next waiting call with a small body, which waits for no large one."""
        return next((one for one in self.waiting if not one.is_large and self._has_room(one)), None)

    def _has_room(self, turn: Turn) -> bool:
        identity = turn.identity
        if self.num_running >= identity.max_calls:
            return False
        is_within = self.num_bytes + turn.num_bytes <= identity.max_bytes
        return is_within or not turn.is_large or not self.num_bytes


class CallQueue:
    """See the module's docstring. It is used in one event loop."""

    def __init__(self, *, total_bytes: int = TOTAL_BYTES) -> None:
        """Begin empty.

        Args:
            total_bytes: Bodies that are read or parsed at once, of all identities; a larger one
                is read alone.
        """
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()

    @asynccontextmanager
    async def turn(self, identity: Identity, num_bytes: int) -> AsyncIterator[Turn]:
        """Wait for the turn of a call; it is running during the block.

        Args:
            identity: Whose call it is.
            num_bytes: Of its body, at most.
        Raises:
            QueueFull: Too many calls of the identity wait already.
        """
        budget = self._budgets.setdefault(identity.name, _Budget())
        if len(budget.waiting) >= MAX_WAITING:
            raise QueueFull
        turn = Turn(identity, num_bytes, self._return_bytes)
        budget.waiting.append(turn)
        try:
            self._start_calls()
            await turn.started
            yield turn
        finally:
            self._end(turn, budget)

    def _start_calls(self) -> None:
        """Start the calls that have room, one call of each identity after the other. A large body
        that has no room is next when bytes are returned; until then only small bodies start.
        """
        started, is_full = True, False
        while started:
            started = False
            for name, budget in list(self._budgets.items()):
                turn = budget.find_next()
                if turn is not None and turn.is_large:
                    is_full = is_full or not self._has_bytes(turn.num_bytes)
                    turn = budget.find_small() if is_full else turn
                if turn is not None:
                    self._start(turn, budget)
                    started = True
                    if turn.is_large:
                        self._budgets.move_to_end(name)

    def _has_bytes(self, num_bytes: int) -> bool:
        return not self._num_bytes or self._num_bytes + num_bytes <= self._total_bytes

    def _start(self, turn: Turn, budget: _Budget) -> None:
        budget.waiting.remove(turn)
        budget.num_running += 1
        if turn.is_large:
            budget.num_bytes += turn.num_bytes
            self._num_bytes += turn.num_bytes
            turn.holds_body = True
        if not turn.started.done():  # else its call was cancelled and is about to end
            turn.started.set_result(None)

    def _return_bytes(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._start_calls()

    def _end(self, turn: Turn, budget: _Budget) -> None:
        if turn in budget.waiting:
            budget.waiting.remove(turn)
        else:
            budget.num_running -= 1
            budget.num_bytes -= turn.num_bytes if turn.is_large else 0
            turn.release_body()
        if not budget.num_running and not budget.waiting:
            self._budgets.pop(turn.identity.name, None)
        self._start_calls()
