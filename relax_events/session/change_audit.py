"""The record of who asked for a change of a run, on `control.audit`."""

from __future__ import annotations

import os
import pwd
import socket
from typing import Any

import orjson

from relax_events.events.types import ChangeRequested

ACCOUNT, TOKEN = "account", "token"
"""How a caller was known: by the rights of its account on the log, or by the API's token."""
ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed"
MAX_ARGUMENTS, MAX_ANSWER, MAX_CALLER = 4000, 1000, 128


def describe_account() -> str:
    """Return the account of this process and its host, as account@host."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a table of accounts
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"[:MAX_CALLER]


def build_change(
    command: str,
    arguments: dict[str, Any],
    *,
    answer: str,
    outcome: str = ACCEPTED,
    identity: str = ACCOUNT,
    caller: str = "",
    address: str = "",
) -> ChangeRequested:
    """Return the record of a change.

    Args:
        command: The route or the command.
        arguments: Its arguments.
        answer: The answer to the caller.
        outcome: What became of it.
        identity: How the caller was known.
        caller: What a client says of itself; empty for the account of this process.
        address: Where a call came from.
    """
    return ChangeRequested(
        identity=identity,
        caller=caller[:MAX_CALLER] or describe_account(),
        address=address,
        command=command,
        arguments=orjson.dumps(arguments, default=str).decode()[:MAX_ARGUMENTS],
        outcome=outcome,
        answer=answer[:MAX_ANSWER],
    )
