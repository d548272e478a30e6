"""Drivers of sessions whose policy talks with an environment of this worker.

function   a turn --> its reply, or none: the sample is over
stateful   open --> what it says first; a turn --> its messages and a reward, until it is over
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from relax_events.environments.pool import EnvironmentPool
from relax_events.environments.reply_media import ProcessedReply
from relax_events.environments.session_pool import (
    EnvironmentSession,
    ProcessedOpening,
    SessionPool,
)
from relax_events.episodes.graph import path_messages
from relax_events.episodes.session import Session, SessionLimit
from relax_events.errors import EpisodeLate
from relax_events.events.parts import FinishReason


class FunctionDriver:
    """Has a function reply to each turn. Functions have no state, so another worker continues an
    aborted session. Implements `Driver`.
    """

    session_type = Session
    keeps_turns = True
    waits_for_people = False

    def __init__(self, pool: EnvironmentPool) -> None:
        """Drive sessions by the function of a pool, which `close` closes."""
        self._pool, self.loop, self.close = pool, pool.loop, pool.close

    async def drive(self, session: Session) -> None:
        """See `Driver`: up to the last turn of the bounds, which gets no reply."""
        if session.sample.turns:
            session.restore(await self._pool.load_media(session.sample.turns))
        replies: list[ProcessedReply] = []
        with suppress(SessionLimit):
            while True:
                node = await session.sample_turn(replies)
                if node.sample.finish_reason is not FinishReason.STOP or session.is_spent:
                    return
                task = session.context
                turns = path_messages(node)[len(task.messages) :]
                reply = await self._pool.reply(session.sample.sample_id, task, turns)
                if reply is None:
                    return
                replies = [reply]


class StatefulDriver:
    """Gives each session an environment with a state. That can't be moved, so an aborted sample is
    begun again. Implements `Driver`.
    """

    session_type = Session
    keeps_turns = False
    waits_for_people = False

    def __init__(self, pool: SessionPool, *, may_reward: bool) -> None:
        """Drive sessions by the environments of a pool, which `close` closes.

        Args:
            pool: Holds the environments.
            may_reward: Whether they may give rewards.
        """
        self._pool, self.loop, self.close = pool, pool.loop, pool.close
        self._may_reward = may_reward

    async def drive(self, session: Session) -> None:
        """See `Driver`: the last turn of the bounds is answered too, for its reward."""
        environment = self._pool.session(
            session.sample.sample_id, session.context, runs_alone=session.runs_alone
        )
        rewards: list[float | None] = []
        try:
            await self._open(session, await asyncio.wrap_future(environment.open()))
            with suppress(SessionLimit):
                await self._play(session, environment, rewards)
        except EpisodeLate:
            self._keep_rewards(session, [*rewards, None])
            raise
        finally:
            environment.close()
        self._keep_rewards(session, rewards)

    def _keep_rewards(self, session: Session, rewards: Sequence[float | None]) -> None:
        """Record the rewards of the turns, 0 for those without any, if any turn has one."""
        was_cut_off = session.graph.nodes[0].sample.finish_reason is not FinishReason.STOP
        if any(reward is not None for reward in rewards) or (self._may_reward and was_cut_off):
            session.rewards = tuple(reward or 0.0 for reward in rewards)

    async def _play(
        self, session: Session, environment: EnvironmentSession, rewards: list[float | None]
    ) -> None:
        """Pass turns to an environment, and collect the rewards; None for a turn that was cut off,
        which no environment sees.
        """
        replies: Sequence[ProcessedReply] = ()
        while True:
            node = await session.sample_turn(replies)
            if node.sample.finish_reason is not FinishReason.STOP:
                rewards.append(None)
                return
            observation = await asyncio.wrap_future(environment.step(node.reply.text))
            rewards.append(observation.reward)
            if observation.is_over or session.is_spent or not observation.replies:
                return
            replies = observation.replies

    async def _open(self, session: Session, opening: ProcessedOpening) -> None:
        """Add to the prompt what an environment says first, if it says anything."""
        if opening.is_empty:
            return
        context, media = opening.add_to(session.context, session.request.media)
        tokens = await session.render_prompt(context.messages, tools=context.tools)
        session.replace_prompt(context, tokens, media)
