"""What an environment imports or implements: a function that replies, or sessions with a state."""

from relax_events.environments.interfaces.protocol import (
    Adapter,
    Observation,
    Opening,
    Session,
    Task,
)
from relax_events.environments.reply import Environment, Reply
from relax_events.environments.tool_calls import ToolCall, read_tool_calls

__all__ = [
    "Adapter",
    "Environment",
    "Observation",
    "Opening",
    "Reply",
    "Session",
    "Task",
    "ToolCall",
    "read_tool_calls",
]
