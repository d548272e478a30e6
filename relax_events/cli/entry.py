"""Runs one `relax` command. This file imports nothing heavy: each command loads what it needs when
it is called.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from relax_events.cli.commands import HELP_FLAGS, help_text
from relax_events.errors import EnvironmentProblem, RelaxError
from relax_events.printable import PrintableStream, printable, write_line
from relax_events.privileges import hide_process

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
READER_LEFT = 141
"""As a shell reports a program that ended because its output is no longer read: 128 +
SIGPIPE."""
NO_ROOM_OR_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


def run_command(on_interrupt: Callable[[int, FrameType | None], object] | int | None) -> None:
    """Run the command line and exit with its code; an error of ours is one text on stderr, never a
    traceback.

    Args:
        on_interrupt: What handles SIGINT from now on; None leaves that.
    """
    hide_process()
    try:
        if on_interrupt is not None:
            signal.signal(signal.SIGINT, on_interrupt)
        with raise_lost_signals():
            result = _called()
        sys.stdout.flush()
    except RelaxError as error:
        write_line(printable(f"error: {error}"), sys.stderr)
        if _is_worker():
            _end_worker(error, exit_code=error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if _is_worker() and ended.code == TERMINATED:  # for the reason that `_end_worker` has
            sys.stdout.flush()
            os._exit(TERMINATED)
        raise
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        sys.exit(READER_LEFT)
    except OSError as error:
        if error.errno not in NO_ROOM_OR_RIGHT or error.filename is None or _is_worker():
            raise
        write_line(
            f"error: can't write {error.filename}: {error.strerror}; relax needs a folder that "
            "this user may write to",
            sys.stderr,
        )
        sys.exit(EnvironmentProblem.exit_code)
    except Exception as error:
        if not _is_worker():
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        _end_worker(error, exit_code=1)
    sys.exit(result if isinstance(result, int) else 0)


@contextmanager
def raise_lost_signals() -> Iterator[None]:
    """Raise what a signal's handler raised, where the Kafka client put a SystemError over it:
    confluent-kafka 2.16.1 does, when a signal meets `list_offsets`.
    """
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
            raise error.__cause__ from None
        raise


def _reader_has_left() -> bool:
    """Return whether the other end of stdout is closed; if so, drop what is still buffered for
    it.
    """
    look = select.poll()
    look.register(sys.stdout.fileno(), 0)
    if not look.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _is_worker() -> bool:
    return sys.argv[1:2] == ["worker"]


def _end_worker(error: Exception, *, exit_code: int) -> NoReturn:
    """End this worker with its error as the last line of its log, at once: a client that was left
    open can keep the interpreter from ending.
    """
    from relax_events.telemetry.final_error import write_final_error

    with suppress(OSError):
        sys.stdout.flush()
    write_final_error(error, exit_code=exit_code)
    os._exit(exit_code)


def _called() -> object:
    if sys.argv[1:] == [] or (len(sys.argv) == 2 and sys.argv[1] in HELP_FLAGS):
        print(help_text())
        return None
    if sys.argv[1:] == ["health"]:  # asked so often that the parser would be most of its cost
        from relax_events.cli.health import health

        health()
        return None
    # A broker that is up for this command goes down with it. Runs have a way of their own, and so
    # have workers from when they drain on signals.
    for number in (signal.SIGTERM,) if _is_worker() else (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    import structlog

    from relax_events.cli.app import app

    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )  # stdout is for data
    if not _is_worker():
        sys.stdout = PrintableStream(sys.stdout)  # much of the output comes from other programs
    return app()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
