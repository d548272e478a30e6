"""What a driver of sessions implements, and the sessions, turns and paths that it is given."""

from relax_events.episodes.engine import Driver
from relax_events.episodes.graph import Continuation, Node, path_media, path_messages, path_tokens
from relax_events.episodes.session import (
    Limit,
    PreparedTurn,
    Session,
    SessionBounds,
    SessionClosed,
    SessionLimit,
)
from relax_events.runtime.loop_thread import LoopThread

__all__ = [
    "Continuation",
    "Driver",
    "Limit",
    "LoopThread",
    "Node",
    "PreparedTurn",
    "Session",
    "SessionBounds",
    "SessionClosed",
    "SessionLimit",
    "path_media",
    "path_messages",
    "path_tokens",
]
