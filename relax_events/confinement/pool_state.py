"""The part of a pool of children that lives in the driver's thread: which child gets which request,
which child is lost, and what is repeated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from relax_events.confinement.child import EXIT_SECONDS, Child
from relax_events.confinement.driver import Driver, find_driver
from relax_events.confinement.frames import encode_head
from relax_events.confinement.requests import ChildLost, Kind, Reply, Request
from relax_events.confinement.served import (
    IS_CONCURRENT,
    LOAD_ERROR,
    MAX_IN_FLIGHT,
    RENEW,
    RETRY,
)
from relax_events.confinement.settings import ChildSettings
from relax_events.confinement.variables import build_child_environment


@dataclass(slots=True)
class Slot:
    """The place of a child: it, the requests for it alone, and who waits for its start."""

    child: Child | None = None
    waiting: deque[Request] = field(default_factory=deque)
    starting: list[Future[dict[str, Any]]] = field(default_factory=list)

    def holds_state_for(self, request: Request) -> bool:
        """Whether the process that a request belongs to, if to any, is there."""
        is_there = self.child is not None and self.child.number == request.child
        return request.child is None or is_there


class PoolState:
    """Children in their slots, and the requests that wait for them. Implements `ChildOwner`."""

    def __init__(self, settings: ChildSettings) -> None:
        """Start no child yet."""
        self._settings = settings
        self._setup = encode_head(settings.setup)
        self.slots = [Slot() for _ in range(settings.size)]
        self._waiting: deque[Request] = deque()
        self._is_closed = False
        self._facts: dict[str, Any] = {}

    @property
    def is_used(self) -> bool:
        """Whether anything was asked of the pool: before that it needs no thread."""
        return "driver" in vars(self)

    @cached_property
    def driver(self) -> Driver:
        """The driver of this process, started if it does not run."""
        return find_driver()

    def start(self, started: Sequence[Future[dict[str, Any]]]) -> None:
        """Start all children; each future gets what its child says when it is loaded."""
        for slot, future in zip(self.slots, started, strict=True):
            if self._is_closed:
                future.set_exception(ChildLost("closed", "was closed"))
            elif slot.child is not None and slot.child.ready is not None:
                future.set_result(slot.child.ready)
            else:
                slot.starting.append(future)
                self._ensure_child(slot)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, and send those for which children have room."""
        for request in requests:
            if self._is_closed:
                request.on_done(ChildLost("closed", "was closed"))
            elif request.slot is None:
                self._waiting.append(request)
            elif self.slots[request.slot].holds_state_for(request):
                self.slots[request.slot].waiting.append(request)
            else:
                request.on_done(ChildLost("state_lost", ""))
        self._dispatch()

    def close(self) -> list[Child]:
        """Fail all requests, and hand the children over to be ended."""
        self._is_closed = True
        lost = ChildLost("closed", "was closed")
        children = [slot.child for slot in self.slots if slot.child is not None]
        for slot in self.slots:
            self._fail_slot(slot, lost)
        self._fail_waiting(lost)
        for child in children:
            self.driver.forget(child)
            child.close_requests()
        if self.is_used:
            self.driver.forget_owner(self)
        return children

    def end_children(self) -> None:
        """End all children; what they run is repeated."""
        for slot in self.slots:
            if slot.child is not None:
                self._replace(slot, list(slot.child.requests.values()))

    def find_deadline(self) -> float | None:
        """See `ChildOwner`."""
        deadlines = [
            deadline
            for slot in self.slots
            if slot.child is not None and (deadline := self._deadline(slot.child)) is not None
        ]
        return min(deadlines, default=None)

    def end_late_children(self, now: float) -> None:
        """See `ChildOwner`."""
        for slot in self.slots:
            child = slot.child
            if child is None or (deadline := self._deadline(child)) is None or deadline > now:
                continue
            if child.ready is None:
                self._lose(slot, "late", seconds=self._settings.start_seconds)
            elif late := self._find_late(child, now):
                self._lose(slot, "late", seconds=late.seconds)
            else:
                self._lose(slot, "silent", seconds=self._settings.silent_seconds or 0.0)

    def read_answers(self, child: Child) -> None:
        """See `ChildOwner`."""
        slot = next(slot for slot in self.slots if slot.child is child)
        received = child.receive()
        for request, reply in received.answers:
            if request is not None:
                self._finish(slot, child, request, reply)
            elif child is slot.child:
                self._handle_message(slot, child, reply)
        if received.loss is not None and child is slot.child:
            kind, ending = received.loss
            exit_seconds = EXIT_SECONDS if kind == "died" else 0.0
            self._lose(slot, kind, ending=ending, exit_seconds=exit_seconds)
        self._dispatch()

    def _deadline(self, child: Child) -> float | None:
        return child.deadline(
            start_seconds=self._settings.start_seconds,
            silent_seconds=self._settings.silent_seconds,
        )

    def _find_late(self, child: Child, now: float) -> Request | None:
        running = child.requests.values()
        return next((one for one in running if one.started + one.seconds <= now), None)

    def _ensure_child(self, slot: Slot) -> Child | None:
        """Return a slot's child, started if there is none; None if no process can be started."""
        if slot.child is None:
            settings = self._settings
            try:
                slot.child = Child(
                    settings.entry_point.module,
                    confinement=settings.confinement,
                    variables=build_child_environment(settings.variables),
                    setup=self._setup,
                    limits=settings.limits,
                )
            except OSError as error:
                lost = ChildLost("died", f"can't be started: {error}", was_loaded=False)
                self._fail_slot(slot, lost)
                self._fail_waiting(lost)
                return None
            slot.child.write()
            self.driver.watch(slot.child, self)
        return slot.child

    def _handle_message(self, slot: Slot, child: Child, reply: Reply) -> None:
        """Handle a message that answers no request: the first says that the child is loaded."""
        if child.ready is not None:
            return
        if LOAD_ERROR in reply.head:
            self._lose(slot, "unloaded", ending=str(reply.head[LOAD_ERROR]))
            return
        if changed := self._find_changed(reply.head):
            self._lose(slot, "changed", ending=changed)
            return
        child.ready = reply.head
        child.is_concurrent = bool(reply.head.get(IS_CONCURRENT, False))
        for future in slot.starting:
            future.set_result(reply.head)
        slot.starting.clear()

    def _find_changed(self, facts: Mapping[str, Any]) -> str:
        """Return the fact that another child said differently before; empty if none."""
        fixed = {name: facts[name] for name in self._settings.fixed_facts}
        self._facts = self._facts or fixed
        changed = (str(value) for name, value in fixed.items() if value != self._facts[name])
        return next(changed, "")

    def _finish(self, slot: Slot, child: Child, request: Request, reply: Reply) -> None:
        renew = reply.head.pop(RENEW, None)
        if renew is None or child is not slot.child:
            request.on_done(reply)
            return
        if renew == RETRY and child.num_answered > 1:
            self._replace(slot, [request, *child.requests.values()])
            return
        request.on_done(reply)
        self._replace(slot, list(child.requests.values()))

    def _dispatch(self) -> None:
        """Give the waiting requests to children with room for them, and start those children."""
        num_running = sum(len(slot.child.requests) for slot in self.slots if slot.child)
        share = math.ceil((len(self._waiting) + num_running) / len(self.slots))
        for slot in self.slots:
            self._send(slot, slot.waiting, share=1 << 30)
            self._send(slot, self._waiting, share=share)

    def _send(self, slot: Slot, waiting: deque[Request], *, share: int) -> None:
        """Fill a child with requests.

        Args:
            slot: Its place.
            waiting: The queue.
            share: Its part of the queue. A child that takes one request after the other gets a
                quarter at a time, so that all children stay busy until the last.
        """
        if not waiting:
            return
        child = self._ensure_child(slot)
        if child is None or child.ready is None or child.is_isolating:
            return
        window = share if child.is_concurrent else math.ceil(share / 4)
        window = min(window, child.ready.get(MAX_IN_FLIGHT, 1))
        room = window - len(child.requests)
        is_half_full = not child.is_concurrent and len(child.requests) > window // 2
        if is_half_full and not waiting[0].is_alone:
            return  # few writes of several requests each
        if requests := _take(waiting, room, is_idle=not child.requests):
            child.send(requests)
            self.driver.watch_writing(child)

    def _lose(
        self,
        slot: Slot,
        kind: Kind,
        *,
        ending: str = "",
        seconds: float = 0.0,
        exit_seconds: float = 0.0,
    ) -> None:
        """End a child that failed; fail the request that it ran, and repeat the others, unless
        their state is lost. Of a child that runs several at a time, each may be the culprit,
        unless it said which one blocks it.
        """
        child, exit_text = self._end(slot, exit_seconds=exit_seconds)
        text = ending + exit_text if kind == "died" else ending or exit_text
        lost = ChildLost(kind, text, seconds=seconds, was_loaded=child.ready is not None)
        if child.ready is None:
            self._fail_slot(slot, lost)
            self._fail_waiting(lost)
            return
        running, repeated = list(child.requests.values()), []
        if self._settings.keeps_state:
            failed = child.list_suspects()
            for request in set(running).difference(failed):
                request.on_done(ChildLost("state_lost", ""))
        elif child.is_concurrent and len(running) > 1:
            failed, repeated = [], running
            for request in repeated:
                request.is_alone = True
        else:
            failed, repeated = running[:1], running[1:]
        for request in failed:
            request.on_done(lost)
        self._repeat(slot, repeated)
        self._dispatch()

    def _replace(self, slot: Slot, repeated: Sequence[Request]) -> None:
        """End a child that did not fail, and give its requests to a new one."""
        self._end(slot)
        self._repeat(slot, repeated)
        self._dispatch()

    def _end(self, slot: Slot, *, exit_seconds: float = 0.0) -> tuple[Child, str]:
        child = slot.child
        assert child is not None
        self.driver.forget(child)
        slot.child = None
        waiting = list(slot.waiting)
        slot.waiting.clear()
        self._repeat(slot, waiting)
        return child, child.end(exit_seconds=exit_seconds)

    def _repeat(self, slot: Slot, requests: Sequence[Request]) -> None:
        """Queue requests for a new process, before others; refuse those of the old one's state."""
        for request in reversed(requests):
            if request.child is not None:
                request.on_done(ChildLost("state_lost", ""))
                continue
            queue = self._waiting if request.slot is None else slot.waiting
            queue.appendleft(request)

    def _fail_slot(self, slot: Slot, lost: ChildLost) -> None:
        for future in slot.starting:
            future.set_exception(lost)
        slot.starting.clear()
        running = list(slot.child.requests.values()) if slot.child is not None else []
        failed = [*running, *slot.waiting]
        slot.waiting.clear()
        for request in failed:
            request.on_done(lost)

    def _fail_waiting(self, lost: ChildLost) -> None:
        failed = list(self._waiting)
        self._waiting.clear()
        for request in failed:
            request.on_done(lost)


def _take(waiting: deque[Request], room: int, *, is_idle: bool) -> list[Request]:
    """Take requests from the front; a request that must run alone goes to an idle child."""
    if waiting[0].is_alone:
        return [waiting.popleft()] if is_idle else []
    requests: list[Request] = []
    while waiting and len(requests) < room and not waiting[0].is_alone:
        requests.append(waiting.popleft())
    return requests
