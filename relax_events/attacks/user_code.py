"""Functions of a user that fail in every way that their samples ask for: code that runs with the
rights of its worker's account, and still must not touch other samples or the worker's secrets.

Child processes load this file by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SECRETS = ("AWS_SECRET_ACCESS_KEY", "BROKER_PASSWORD", "RELAX_ATTACK_SECRET")
"""Variables of a worker that no child may get."""
WELL = "well"


def read_parent(what: str) -> str:
    """Return whether the parent's memory, or a variable that it was started with, can be `read`,
    or is `refused`. A process title may stand where the variables were.
    """
    try:
        with Path(f"/proc/{os.getppid()}/{what}").open("rb") as file:
            content = file.read(1 << 20)
    except OSError:
        return "refused"
    return "read" if what == "mem" or b"PATH=" in content else "refused"


def act(what: str) -> Any:
    """Do the act that a sample asks for, and return nonsense."""
    match what:
        case "exit":
            os._exit(0)
        case "kill itself":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "grow":
            return len(bytearray(1 << 40))
        case "print":
            print('{"reward": 1.0}' * 10_000, flush=True)
            os.write(1, b"\x00\x00\x00\x00" * 10_000)
        case "write on all descriptors":
            for number in range(3, 64):
                try:
                    os.write(number, b'{"number": 1}')
                except OSError:
                    continue
        case "close all descriptors":
            os.closerange(0, 256)
        case "recursion":
            return act("recursion")
        case "raise":
            raise KeyboardInterrupt
        case "leave":
            sys.exit(0)
        case "infinity":
            return float("inf")
        case "an object":
            return object()
        case "a long text":
            return "a" * (128 << 20)
        case "variables of the parent" | "memory of the parent":
            return 1.0 if read_parent("environ" if "var" in what else "mem") == "read" else None
        case "secrets":
            return 1.0 if any(name in os.environ for name in SECRETS) else None
    return None


FAILURES = (
    *("exit", "kill itself", "hang", "grow", "print", "write on all descriptors"),
    *("close all descriptors", "recursion", "raise", "leave", "infinity", "an object"),
    *("a long text", "variables of the parent", "memory of the parent", "secrets"),
)


def score(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> Any:
    """Score an honest completion with 0.5; fail as any other asks for."""
    del answer, metadata, prompt
    return 0.5 if completion == WELL else act(completion)


def reply(completion: str, *, metadata: dict[str, Any]) -> Any:
    """Reply to an honest turn; fail as any other asks for."""
    del metadata
    if completion == WELL:
        return WELL
    value = act(completion)
    return {"text": value} if value is None else value


class Session:
    """The same in the form of Gymnasium."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Begin."""
        del seed, options
        return "", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Answer an honest action; fail as any other asks for."""
        if action == WELL:
            return WELL, 0.0, False, False, {}
        value = act(action)
        if value is None or not isinstance(value, float):
            raise ValueError(action)
        return "read", value, False, False, {}
