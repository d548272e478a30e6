"""Tells replicas of one role apart that were all started by the same command line."""

from __future__ import annotations

import socket
import zlib


def index_of_host() -> int:
    """Derive a worker's index from this machine's name.

    A container keeps its name when it is started again, so its worker is the same one, and what it held is found to be its own.
    """
    return zlib.crc32(socket.gethostname().encode())
