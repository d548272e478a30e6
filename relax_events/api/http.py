"""What an HTTP server of a package is made of: its socket, the guard before it, and the process
that ends with `relax run`.
"""

from relax_events.http.guard import App, GuardLimits, Message, Receive, RequestGuard, Send
from relax_events.http.identity import (
    BodyBound,
    Identify,
    Identity,
    RequestHead,
    is_same_secret,
    read_identity,
)
from relax_events.http.server import (
    build_server_config,
    build_url,
    find_missing_package,
    open_listener,
)
from relax_events.http.tls import TlsFiles, choose_run_tls
from relax_events.runtime.parent_watch import SUPERVISOR_PID_VARIABLE, drain_when_supervisor_exits
from relax_events.secret_handling import read_secret

__all__ = [
    "SUPERVISOR_PID_VARIABLE",
    "App",
    "BodyBound",
    "GuardLimits",
    "Identify",
    "Identity",
    "Message",
    "Receive",
    "RequestGuard",
    "RequestHead",
    "Send",
    "TlsFiles",
    "build_server_config",
    "build_url",
    "choose_run_tls",
    "drain_when_supervisor_exits",
    "find_missing_package",
    "is_same_secret",
    "open_listener",
    "read_identity",
    "read_secret",
]
