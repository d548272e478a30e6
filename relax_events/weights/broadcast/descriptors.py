"""Hands descriptors of memory files to other processes of the same user and machine that know a
file's key.

A listener in the abstract namespace of Unix sockets works where no process may read another one
through /proc (`privileges.hide_process`), and within one network namespace alone. Its name and a
file's key are random; both travel only over an authenticated connection.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from array import array
from contextlib import suppress

NAME = "relax-weights"
KEY_BYTES = 16
REQUEST_SECONDS = 5.0
"""For a peer to send a file's key. Requests are served one at a time."""
RESPONSE_SECONDS = 15.0
"""To wait for a descriptor: longer than a silent peer before this one delays the server."""
ACCEPT_RETRY_SECONDS = 0.1
CREDENTIALS = struct.Struct("iII")
"""Of the peer of a Unix socket: process, user, group."""


class SharedFile:
    """An open file that other processes of this user get if they know its key.

    Attributes:
        descriptor: Closed with this object.
        key: Random.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor."""
        self.descriptor = descriptor
        self.key = secrets.token_bytes(KEY_BYTES)
        weakref.finalize(self, os.close, descriptor)


class DescriptorServer:
    """Sends the descriptors of this process's shared files, from a thread that ends with the
    process. It keeps no file open: the key of a file that is gone is refused.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._listener: socket.socket | None = None
        self.forget()

    def forget(self) -> None:
        """Begin again without a listener, in a child process after a fork: its parent continues to
        use the inherited one.
        """
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        self._lock = threading.Lock()
        self._name = ""
        self._files = weakref.WeakValueDictionary[bytes, SharedFile]()

    def share(self, file: SharedFile) -> str:
        """Serve a file while it exists; return the name of the socket. The first call starts the
        thread.

        Raises:
            OSError: No socket can be opened.
        """
        self._files[file.key] = file
        with self._lock:
            if self._listener is None:
                self._name = f"{NAME}-{secrets.token_hex(KEY_BYTES)}"
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._listener.bind(f"\0{self._name}")
                self._listener.listen()
                threading.Thread(
                    target=self._run, args=(self._listener,), name="weight-buffers", daemon=True
                ).start()
            return self._name

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # no descriptor is free
                time.sleep(ACCEPT_RETRY_SECONDS)
                continue
            with connection, suppress(OSError):  # the peer is silent, or gone
                self._respond(connection)

    def _respond(self, connection: socket.socket) -> None:
        """Send a file's descriptor to a peer of the same user that sends its key, else nothing."""
        connection.settimeout(REQUEST_SECONDS)
        if read_peer_user(connection) != os.geteuid():
            return
        file = self._find_file(connection.recv(KEY_BYTES + 1))
        if file is not None:
            socket.send_fds(connection, [b"1"], [file.descriptor])

    def _find_file(self, key: bytes) -> SharedFile | None:
        files = [reference() for reference in self._files.valuerefs()]
        matching = [file for file in files if file and hmac.compare_digest(file.key, key)]
        return matching[0] if matching else None


def read_peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(content)[1])


def request_descriptor(name: str, key: bytes, *, seconds: float = RESPONSE_SECONDS) -> int:
    """Get the descriptor of another process's shared file, which the caller closes.

    Args:
        name: Of the socket of that process's server.
        key: The file's.
        seconds: How long to wait for the descriptor.
    Raises:
        OSError: No such socket in this network namespace, another user's, or the key is refused.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(seconds)
        connection.connect(f"\0{name}")
        if (user := read_peer_user(connection)) != os.geteuid():
            raise PermissionError(
                f"the process behind the socket {name} runs as user {user}, not as this process's "
                f"user {os.geteuid()}; run both as one user"
            )
        connection.send(key)
        return _receive_descriptor(connection)


def _receive_descriptor(connection: socket.socket) -> int:
    """Receive exactly one descriptor. The kernel closes descriptors beyond the buffer's size."""
    files = array("i")
    _, ancillary, flags, _ = connection.recvmsg(
        1, socket.CMSG_LEN(files.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content[: len(content) // files.itemsize * files.itemsize])
    if len(files) == 1 and not flags & socket.MSG_CTRUNC:
        return files[0]
    for file in files:
        os.close(file)
    if flags & socket.MSG_CTRUNC:
        raise ConnectionError("the peer sent several descriptors, not one")
    raise ConnectionError("the peer sent no descriptor: no buffer of it has this key any more")


SERVER = DescriptorServer()
os.register_at_fork(after_in_child=SERVER.forget)
