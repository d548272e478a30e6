"""`redis-server` as a process of ours; apart from the client, which our own environment doesn't
have."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 20.0
ASK_EVERY_SECONDS = 0.02


class RedisServer:
    """`redis-server` on a free port, with the append-only file synced every second, or in memory
    alone."""

    environment: Mapping[str, str] = {}

    def __init__(self, directory: Path, *, is_durable: bool) -> None:
        directory.mkdir(parents=True)
        persistence = (
            ["--appendonly", "yes", "--appendfsync", "everysec"]
            if is_durable
            else ["--appendonly", "no"]
        )
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port = probe.getsockname()[1]
        self.address = f"{HOST}:{self._port}"
        self._command = [
            "redis-server",
            "--bind",
            HOST,
            "--port",
            str(self._port),
            "--dir",
            str(directory),
            "--save",
            "",
            *persistence,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See `Server.start`."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"redis-server was not ready within {START_SECONDS:g} s")
            time.sleep(ASK_EVERY_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(
                    b"+PONG"
                )  # while it loads its file it responds with an error instead
        except OSError:
            return False

    def pids(self) -> list[int]:
        """See `Server.pids`."""
        return [self._process.pid] if self._process else []

    def kill_storage(self) -> None:
        """See `Server.kill_storage`."""
        if self._process:
            self._process.kill()
            self._process.wait(10)

    def stop(self) -> None:
        """See `Server.stop`."""
        if self._process:
            self._process.terminate()
            self._process.wait(20)
