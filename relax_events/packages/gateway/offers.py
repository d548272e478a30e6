"""Sessions for harnesses that a person starts: an episode is offered until a harness takes it.

    episode   offer --> waiting --> taken by a harness --> calls --> finished: reward or error
                           ^                                |
                           `---- begun again: late, or failed

A harness asks any gateway of the run for a session, drives the policy with its key, and finishes
it. An episode waits without a deadline, since no harness may have started yet. Once taken, it has
the deadlines of any program. All of it runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_events.api.errors import EpisodeFailed
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.program import ProgramLimits, wait_for_end

MAX_REMEMBERED = 4096
"""Finished sessions whose harness may ask again whether they are."""


@dataclass(slots=True, eq=False)
class Offer:
    """An episode for a harness.

    Attributes:
        session: Its session.
        key: Of the session.
        task: The part of the row that the harness gets.
        taken: Set when a harness has it.
        ended: The harness's reward, None without one; or why it failed.
    """

    session: ChatSession
    key: str
    task: Mapping[str, Any]
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[float | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SessionOffers:
    """The episodes that wait for a harness, and the episodes that a harness has taken."""

    def __init__(self, limits: ProgramLimits) -> None:
        """Begin without any.

        Args:
            limits: Deadlines of an episode from the moment that it is taken.
        """
        self.limits = limits
        self._waiting: dict[str, Offer] = {}
        self._taken: dict[str, Offer] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._changed = asyncio.Condition()

    @property
    def num_taken(self) -> int:
        """Episodes that a harness has."""
        return len(self._taken)

    async def run(self, session: ChatSession, key: str, task: Mapping[str, Any]) -> float | None:
        """Offer an episode, and wait until a harness has finished it.

        Returns:
            The harness's reward; None if it gave none.
        Raises:
            EpisodeFailed: The harness says that it failed, or is late before a turn of the policy.
            EpisodeLate: It is late after a turn of the policy.
        """
        offer = Offer(session, key, task)
        try:
            async with self._changed:
                self._waiting[key] = offer
                self._changed.notify()
            await offer.taken.wait()
            await wait_for_end(offer.ended, self.limits, session, who="the harness")
            return offer.ended.result()
        finally:
            offer.ended.cancel()
            self._waiting.pop(key, None)
            self._taken.pop(key, None)

    async def take(self, *, seconds: float) -> Offer | None:
        """Return the oldest waiting episode, which the caller has from now on; None if there is
        none within a time.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting))
                offer = self._waiting.pop(next(iter(self._waiting)))
        except TimeoutError:
            return None
        self._taken[offer.key] = offer
        offer.taken.set()
        return offer

    def is_finished(self, key: str) -> bool:
        """Return whether a harness has finished the session of a key."""
        return key in self._finished

    def finish(self, key: str, *, reward: float | None, error: str) -> bool:
        """End the episode of a key; a repeated call changes nothing.

        Args:
            key: Of the session.
            reward: The harness's own reward.
            error: Why the harness failed; the episode is then begun again.
        Returns:
            Whether a harness has, or had, this session.
        """
        if key in self._finished:
            return True
        offer = self._taken.get(key)
        if offer is None or offer.ended.done():
            return False
        if error:
            offer.ended.set_exception(EpisodeFailed(f"the harness failed: {error}"))
        else:
            offer.ended.set_result(reward)
        self._finished[key] = None
        if len(self._finished) > MAX_REMEMBERED:
            self._finished.popitem(last=False)
        return True
