"""Keeps the texts of a model from running as code while a library scores them.

Python calls an audit hook before each compilation. Within `guard_texts`, each source
must be a literal or, in sympy's parser, arithmetic; anything else raises before it runs. Writing
files, starting processes, connecting and native calls raise as well. This is the inner of two
walls: the process of a verifier is confined.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from relax_events.packages.verifiers.evaluated_text import (
    Grammar,
    RefusedTextError,
    check_text,
    check_tree,
)

SYMPY_PARSER = "/sympy/parsing/sympy_parser.py"
SYMPY_NAMES = "from sympy import *"
"""Executed by sympy's parser itself, to fill the namespace of an expression."""
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED_FAMILIES = (
    "subprocess.",
    "socket.",
    "ctypes.",
    "shutil.",
    "urllib.",
    "webbrowser.",
    "pty.",
)
REFUSED = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill"),
    *("os.killpg", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"),
    *("os.truncate", "os.chmod", "os.chown", "os.putenv", "os.unsetenv", "os.chdir", "os.utime"),
    *("code.__new__", "function.__new__", "pickle.find_class", "builtins.input", "gc.get_objects"),
    *("gc.get_referrers", "sys.settrace", "sys.setprofile", "signal.pthread_kill", "syslog.syslog"),
    *("object.__setattr__", "object.__delattr__", "mmap.__new__", "fcntl.ioctl"),
}


class _State(threading.local):
    """Whether this thread is scoring, and whether its hook is at work."""

    is_scoring = False
    is_checking = False


_state = _State()


@contextmanager
def guard_texts() -> Iterator[None]:
    """Refuse, in this thread and context, everything that a text must not do.

    A refused compilation raises `RefusedTextError`, any other refused event `PermissionError`.
    """
    _install()
    before, _state.is_scoring = _state.is_scoring, True
    try:
        yield
    finally:
        _state.is_scoring = before


@cache
def _install() -> None:
    """Add the hook; a process can't remove it, so there is one."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _state.is_scoring or _state.is_checking:
        return
    if event != "compile" and event != "open" and not _is_refused(event):
        return
    _state.is_checking = True
    try:
        _check(event, arguments, sys._getframe(1))  # noqa: SLF001  # the documented way to a caller
    finally:
        _state.is_checking = False


def _is_refused(event: str) -> bool:
    return event in REFUSED or event.startswith(REFUSED_FAMILIES)


def _check(event: str, arguments: tuple[Any, ...], caller: FrameType) -> None:
    if event == "open" and not _is_writing(*arguments):
        return
    if _is_importing(caller):
        return
    if event != "compile":
        raise PermissionError(f"a text that is being scored caused {event}, which is refused")
    _check_compilation(arguments[0], caller)


def _is_writing(path: object, mode: object, flags: object) -> bool:
    del path
    if isinstance(mode, str) and set(mode) & set("wax+"):
        return True
    return isinstance(flags, int) and bool(flags & WRITING)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a library is importing a module of its own."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def _check_compilation(source: object, caller: FrameType) -> None:
    if caller.f_code.co_filename == ast.__file__:  # builds a tree, and runs nothing
        return
    in_parser = caller.f_code.co_filename.endswith(SYMPY_PARSER)
    if in_parser and source in (SYMPY_NAMES, SYMPY_NAMES.encode()):
        return
    grammar = Grammar.ARITHMETIC if in_parser else Grammar.LITERAL
    if isinstance(source, str | bytes):
        check_text(source, grammar)
    elif isinstance(source, ast.AST):
        check_tree(source, grammar)
    else:
        raise RefusedTextError("a text that is being scored caused a compilation of a file")
