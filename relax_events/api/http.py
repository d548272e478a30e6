"""What an HTTP server of a package is made of: its socket, the guard before it, and the process
that ends with `relax run`.
"""

from relax_events.http.guard import App, GuardLimits, Message, Receive, RequestGuard, Send
from relax_events.http.identity import Identity, RequestHead, read_identity
from relax_events.http.server import (
    build_server_config,
    build_url,
    find_missing_package,
    open_listener,
)
from relax_events.runtime.parent_watch import SUPERVISOR_PID_VARIABLE, drain_when_supervisor_exits

__all__ = [
    "SUPERVISOR_PID_VARIABLE",
    "App",
    "GuardLimits",
    "Identity",
    "Message",
    "Receive",
    "RequestGuard",
    "RequestHead",
    "Send",
    "build_server_config",
    "build_url",
    "drain_when_supervisor_exits",
    "find_missing_package",
    "open_listener",
    "read_identity",
]
