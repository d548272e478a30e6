"""Unit tests are pure logic: a test that starts a thread or a process, or uses a socket, fails
here; it belongs in `tests/component`."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_events.models.chat_template import compile_template

ROOT = Path(__file__).parents[2]
STANDARD_LIBRARY = Path(os.__file__).parent
FORBIDDEN: list[tuple[Any, str, str]] = [
    (threading.Thread, "start", "a thread was started"),
    (subprocess.Popen, "__init__", "a process was started"),
    (os, "fork", "the process was forked"),
    (socket.socket, "bind", "a socket was bound"),
    (socket.socket, "connect", "a connection was opened"),
]
platform.processor()  # asks a program, once in a process


class Forbidden(BaseException):
    """A unit test does more than compute. No `except Exception` of the code under test catches
    it."""


def _is_ours() -> bool:
    """Return whether the nearest caller outside of the standard library is this project: libraries
    may read a file by threads of their own."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_absolute() and (
            STANDARD_LIBRARY not in path.parents or "site-packages" in path.parts
        ):
            return ROOT in path.parents and "site-packages" not in path.parts
        frame = frame.f_back  # type: ignore[assignment]
    return False


@pytest.fixture(autouse=True, scope="session")
def _templates_in_this_process() -> Iterator[None]:
    """Render chat templates here: their confined process is tested in `tests/component`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relax_events.models.tokenizer_folder.open_template", compile_template)
        yield


@pytest.fixture(autouse=True)
def only_logic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that starts a thread or a process, or uses a socket, also where the code under
    test swallows the error."""
    found: list[str] = []

    def forbid(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def guarded(*arguments: Any, **settings: Any) -> Any:
            if _is_ours():
                found.append(what)
                raise Forbidden(what)
            return original(*arguments, **settings)

        monkeypatch.setattr(owner, name, guarded)

    for owner, name, what in FORBIDDEN:
        forbid(owner, name, what)
    yield
    if found:
        pytest.fail(f"{', '.join(sorted(set(found)))} by a unit test; move it to tests/component")
