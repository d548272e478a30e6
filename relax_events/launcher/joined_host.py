"""The supervisor of another host of a run, which its first host starts; see `other_hosts`."""

from __future__ import annotations

import os
import select
import sys
import threading

import orjson

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, RelaxError
from relax_events.launcher.other_hosts import PROBE, SILENCE_SECONDS, describe_host
from relax_events.launcher.run import JoinedSession
from relax_events.printable import printable
from relax_events.privileges import hide_process
from relax_events.runtime.private_files import keep_private

READ_BYTES = 65_536


def join() -> None:
    """Read the run from stdin, and start and supervise this host's workers until the run ends or
    the first host is gone; do nothing where it is gone before.

    Raises:
        ConfigError: The run file is of another release, or names something that this host lacks.
    """
    if not (line := _read_order()):
        return
    order = orjson.loads(line)
    os.environ.update(order["variables"])
    try:
        config = RunConfig.model_validate_json(orjson.dumps(order["config"]))
    except ValueError as error:
        raise ConfigError(f"this host's release can't read the run file: {error}") from None
    keep_private(config)
    session = JoinedSession(
        config, host=order["host"], num_gpus=order["num_gpus"], num_steps=order["num_steps"]
    )
    threading.Thread(
        target=_watch_first_host, args=(session,), name="first-host", daemon=True
    ).start()
    session.run()


def _watch_first_host(session: JoinedSession) -> None:
    """Drain the session once stdin ends or is silent for too long."""
    while _read():
        pass
    session.drain()


def _read_order() -> bytes:
    """Return the first line of stdin; nothing where it ends, or is silent for too long, before."""
    content = bytearray()
    while part := _read():
        content += part
        if b"\n" in part:
            return bytes(content.partition(b"\n")[0])
    return b""


def _read() -> bytes:
    """Return what stdin brings next; nothing once it has ended or is silent for too long."""
    stdin = sys.stdin.fileno()
    return os.read(stdin, READ_BYTES) if select.select([stdin], [], [], SILENCE_SECONDS)[0] else b""


def main() -> None:
    """Join a run; with `--probe` describe this host."""
    if sys.argv[1:] == [PROBE]:
        print(orjson.dumps(describe_host()).decode())
        return
    hide_process()
    try:
        join()
    except RelaxError as error:
        print(printable(f"error: {error}"), flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
